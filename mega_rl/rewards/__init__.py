"""Rewards of responses by functions, a service or a model.

`build` makes them from the settings, `call` wraps a user's functions into one call for a batch, `pool` and
`pool_worker` make it in processes, `role` shares a rollout's rows over the ranks, and `components` weighs the outcomes.
"""
