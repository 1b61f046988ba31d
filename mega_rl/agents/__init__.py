"""Agents: exact tokens between turns, tools."""
