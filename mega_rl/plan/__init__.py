"""Memory, traffic and time of a run, from config.json and the recipe: per rank, per phase, with a verdict.

docs/plan.md has the formulas and their sources.
"""
