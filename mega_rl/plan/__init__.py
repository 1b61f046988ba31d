"""Memory, traffic, time and verdict of a run, from config.json and recipe, per rank and phase.

docs/plan.md says what is counted.
"""
