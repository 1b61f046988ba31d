"""Agents: trajectories, environments, exact tokens between turns, tools."""
