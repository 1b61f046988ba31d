"""Memory and traffic of a run, from config.json and the recipe alone: per rank, per phase, with a verdict.

Imports no torch. docs/plan.md has the formulas and their sources.
"""
