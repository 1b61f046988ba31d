"""Ranks and devices: layout arithmetic, process groups, and operations on batches over them.

`layout.ParallelLayout` holds sizes and coordinates, `groups.initialize` builds the groups once, `comm.ranks_of` gives
the `protocols.Ranks` of one of them, `agreement` makes all ranks learn one value or raise one failure, `vocab` computes
log-probs of logits sharded over the vocabulary;
`accelerator` is CUDA and CPU behind one interface.
Must not import `data` or `algorithms`, nor anything that knows a model.
"""
