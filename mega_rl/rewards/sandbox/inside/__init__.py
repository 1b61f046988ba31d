"""Programs inside a sandbox: `harness` runs the tests, `candidate` the code, and `values` goes between them.

They need Python 3.8 and nothing else; `mega_rl.rewards.sandbox.suites` makes one file of them.
"""
