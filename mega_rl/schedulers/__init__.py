"""Schedulers of clusters: a run's nodes placed, started, watched and placed again. Imports no torch."""
