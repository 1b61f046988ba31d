"""Numbers of a run: collected, written, shown.

`sinks.make_sink` makes the one `MetricsSink` of a run (JSONL, TensorBoard, trackers, console), `steps` times the phases
of a step, `tables` prints the tables at the start and the end. docs/metrics.md lists every name. Must not import
`rollout` or `checkpoint`, which are on its layer, nor `trainer`.
"""
