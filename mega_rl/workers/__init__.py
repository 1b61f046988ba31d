"""Roles of a run, each a thin object over an engine or a service.

`models` (actor, critic, reference) stands on an engine; `rollout`, `background`, `ahead` and `colocation` on a
rollout engine; `reward`, `reward_functions`, `reward_http` and `reward_model` score. Must not import `trainer`, which
knows roles only by `mega_rl.protocols`.
"""
