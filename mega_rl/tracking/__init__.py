"""Accounts of a run: progress, metrics, records of steps, health, and the report."""
