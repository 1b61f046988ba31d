"""Operate runs: supervise their ranks, diagnose failures, submit them to a cluster's scheduler.

The core package never imports it; commands do. Ranks keep their records with `mega_rl.tracking.health`.
"""
