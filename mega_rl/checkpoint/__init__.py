"""Checkpoints of a run: saved, committed, loaded under any layout, and pruned.

`store.RunCheckpoints` saves and restores; `saving` writes, `format` defines the files and reads them
strictly, `resume` and `fill` load, `folders` lists and prunes, `weights` and `export` turn the actor
into a Hugging Face checkpoint. docs/checkpoint.md has the format. Must not import `rollout`, `metrics`, `trainer` or
`workers`.
"""
