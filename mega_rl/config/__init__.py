"""Typed run configuration; imports no torch."""
