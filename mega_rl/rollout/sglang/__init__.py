"""Rollouts by SGLang servers. Written for SGLang 0.5.20; see docs/workers/sglang_worker.md.

- `build`: starts or joins a run's servers and connects them with the trainer, from the sections of the config.
- `weights`: `sync` (one update), `checks` before and `probe` after it; `reshard` (buckets), `transport`, and in
  `transports` `cuda_ipc` and `process_group`.
- `generation`: `engine`, `router` (spreads samples over servers), `replica` (a server's state), `client`, `answers`,
  `samples` (the records between them).
- `server`: `pool` (all servers of a run), `process` (one), `group`, `settings`, `addresses`, `memory`,
  `installation`; in the server's own process `launcher`, `nodes` (on several hosts), `cpu_stand_ins`.
- `http`: `keys` and `control`, the client of the endpoints that steer a server.
"""
