"""Rollouts by SGLang servers. Written for SGLang 0.5.20; see docs/workers/sglang_worker.md.

- `server`: a server's life (`process`: start and end, `readiness`), `settings`, `installation`, `pool` (all of a run),
  `group` (its processes); in its own process `launcher`, `nodes` (on several hosts), `cpu_stand_ins`, `private_files`.
- `generation`: `engine` (the protocol), `router`, `scheduler` and `outcomes` (one generation), `health` and `replicas`
  (the servers' state), `jobs`, `client`, `answers`, `failures`, `samples`, `results`, `rows`.
- `weights`: `sync` (the bracket around an update), `checks` before, `probe` after; `reshard` and `buckets` (what goes
  where), `source` (the trainer's side), `transport` and `transports` (`choose`, `shared_memory`, `cuda_ipc`,
  `process_group` and `server_group`).
- `http`: `keys`, `endpoint`, `request`, `api`, `control`, `ask_all`.

`mega_rl.assemble.sglang` joins them with the trainer.
"""
