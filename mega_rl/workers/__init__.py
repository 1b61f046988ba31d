"""Roles of a run over an engine: `models`, `rollout`, `stream`, and `residency` of their state."""
