"""Agents: exact tokens between turns."""
