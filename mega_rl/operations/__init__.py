"""Operate runs: supervise ranks, diagnose failures, submit to schedulers. Only commands import it."""
