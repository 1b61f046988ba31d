"""Rewards of responses by functions, a service or a model.

`build` makes them from the settings, `call` puts functions of every kind behind one form, `pool` calls them here or in
processes of the program `pool_worker`, `role` shares a rollout's rows over the ranks and weighs components.
"""
