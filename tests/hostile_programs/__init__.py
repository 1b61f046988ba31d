"""Hostile programs for the sandbox, and a campaign that runs them with canaries outside.

`python -m tests.hostile_programs` runs all of them and prints a table.
No program is destructive where it succeeds: it says ESCAPED, or touches a canary.
"""
