"""Training prompts that are read while the run goes on, block by block, in an order that a resumed run goes on with.

`shards` opens the files of a stream, `blocks` reads blocks of prompts from them in the background, and `order` draws
the prompts of steps. Imports no torch.
"""
