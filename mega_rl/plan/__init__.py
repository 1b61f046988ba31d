"""Memory, traffic and time of a run, from config.json and the recipe: per rank, per phase, with a verdict.

docs/plan.md says what is counted.
"""
