"""Start, watch, end and restart a run's ranks; node 0's launcher decides for all nodes."""
