"""The run behind `mega-rl quickstart`: a tiny model learns to add, supervised and then with PPO."""

WARM_START = "quickstart-warm-start"  # the hidden command that runs one rank of the supervised part
