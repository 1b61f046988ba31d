"""Rollout sources of a user's own: what they are given, checks of what they return, and the policy's weights."""
