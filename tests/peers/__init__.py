"""TRL's and verl's own functions, called in a process of their own and compared with those of the package.

`batch` has the inputs, which both sides make from one seed; `program` runs `trl_answers` and `verl_answers` and hands
values and gradients to `tests/unit_tests/algorithms/test_peers.py`. The process of pytest imports neither peer.
"""
