"""Roles of a run over an engine: `models`, `rollout`, `ahead`, and `residency` of their state."""
