"""Accounts of a run: progress on the terminal, metrics, records of steps, and the report of its files."""
