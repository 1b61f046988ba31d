"""Locked processes for programs that nobody has read: the answers of a policy, run against the tests of a row.

`local` runs a program under bubblewrap, `remote` at a service that speaks SandboxFusion's protocol; both return a
`limits.Execution`. `harness` is a program for inside, which keeps tests and candidate in processes of their own.
"""
