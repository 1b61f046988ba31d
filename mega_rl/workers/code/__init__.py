"""Rewards of programs: the code of a response, the tests of a row, and the share of them that pass in a sandbox."""
