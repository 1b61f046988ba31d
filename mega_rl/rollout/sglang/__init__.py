"""Rollouts by SGLang servers. Written for SGLang 0.5.21; see docs/workers/sglang_worker.md.

- `build`: starts or joins a run's servers and connects them with the trainer, from the sections of the config.
- `weights`: `sync` (one update), `checks`, `reshard` (buckets), `transport` by `cuda_ipc` or `process_group`.
- `generation`: `engine`, `router` (spreads samples over servers), `replica` (a server's state), `client`, `samples`.
- `server`: `pool` (all servers of a run), `process` (one), `addresses`, `memory`, `installation`; in the server's own
  process `launcher`, `nodes` (on several hosts), `cpu_stand_ins`.
- `control`: address and keys of a server, and the client of the endpoints that steer it.
"""
