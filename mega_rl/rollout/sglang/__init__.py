"""Rollouts by SGLang servers. Written for SGLang 0.5.20; docs/workers/sglang_worker.md tells the whole story.

- A server's life: `server` (start, proof, end), `settings`, `installation`, `pool` (all of a run), `group` (its
  processes); in its own process `launcher`, `stand_ins`, `private`, `keys`.
- Generation: `engine` (the protocol), `fleet` (routing), `generation` and `replicas` (one generation, one server's
  state), `jobs`, `client`, `answers`, `failures`, `samples`, `results`, `rows`.
- Weights: `sync` (the bracket), `checks` before, `probe` after, `control` and `calls` (HTTP), `agreement` (of ranks);
  `reshard` and `buckets` (what goes where), `trainer_weights`; `transports` and `choose`: `shared_memory`, `cuda_ipc`,
  `broadcast`, `on_disk`.
- `connect` joins the three with the trainer.
"""
