"""Roles of a run over an engine: `models`, `rollout`, `ahead`, `own_rollouts`, and `residency` of their state."""
