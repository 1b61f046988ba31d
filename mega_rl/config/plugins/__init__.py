"""Choices that a recipe makes by name: built-in ones, and a user's own in a Python file, which is parsed, not run."""
