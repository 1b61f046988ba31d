"""Operate runs: start and supervise their ranks, diagnose failures, submit them to the scheduler of a cluster.

The core package never imports it; commands do. Ranks keep their records with `mega_rl.tracking.health`.
"""
