"""`mega-rl quickstart`: a tiny model learns a task, first supervised and then by reinforcement learning."""
