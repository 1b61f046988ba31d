"""Order in which a run draws its prompts: a function of the seed and of the number of earlier draws.

`epochs` draws from one list, `success` by measured success, `mixture` from several lists by their weights.
"""
