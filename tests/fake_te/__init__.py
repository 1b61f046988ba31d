"""Transformer Engine's own Python on a CPU: plain torch stands in for its compiled half and its Triton kernels.

`install` makes it importable and computing, `preloaded` is what ranks are forked from, `program` runs the cases of
`on_ranks` and hands their results to `test_transformer_engine.py`. Nothing here runs in the process of pytest.
"""
