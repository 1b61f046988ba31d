"""The run behind `mega-rl quickstart`: a digit task, a tiny model of its own, a warm start and PPO."""
