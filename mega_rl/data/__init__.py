"""Prompts and batches: from rows of a file to micro-batches.

`rows` reads, `prompts.load_prompts` tokenizes, `sampling` and `stream` order, `minibatches` shares rows out, `packing`
makes micro-batches and cuts them for context parallelism. Must not import Megatron-Core, transformers,
`parallel` or `algorithms`.
"""
