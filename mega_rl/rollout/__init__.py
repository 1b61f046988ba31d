"""Rollout engines: they sample responses with the weights last published to them.

`embedded` runs a Hugging Face model in the trainer's process, `sglang` talks to servers; `counter_rng` and
`stop_tokens` serve both. `trainer.assemble.rollouts` chooses. Must not import `trainer`, `workers`, `checkpoint` or
`metrics`: a rollout engine knows no role and no loop.
"""
