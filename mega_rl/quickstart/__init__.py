"""The run behind `make quickstart`: a digit task, a tiny model of its own, a warm start and PPO."""
