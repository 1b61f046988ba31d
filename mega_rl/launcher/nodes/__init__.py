"""Nodes of a run: this one, those of other launchers, and how launchers know and hear one another."""
