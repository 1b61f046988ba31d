"""Rollout engines: they sample responses with the weights last published to them.

`embedded` (with `decoding`) runs a Hugging Face model in the trainer's process, `sglang` talks to servers; `sampling`
and `tokens` serve both. A rollout engine knows no role and no loop: it imports no `trainer`, `workers` or `checkpoint`.
"""
