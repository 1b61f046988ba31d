"""Sandboxed execution of model-written programs against a row's tests.

`local` runs a program under bubblewrap, `remote` at a service that speaks SandboxFusion's protocol. Both return a
`limits.Execution`. `inside.harness` runs inside and keeps tests and candidate in separate processes.
"""
