"""Checkpoints of a run: saved, committed, loaded under any layout, and pruned.

`store.RunCheckpoints` saves and restores; `saving` writes, `format` defines the files and reads them strictly, `resume`
loads, `folders` lists and prunes, `weights` reads a model for the converters. docs/checkpoint.md has the format. Must
not import `rollout`, `metrics`, `trainer` or `workers`.
"""
