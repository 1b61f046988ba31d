"""Order in which a run draws its prompts: a function of the seed and the draw's number.

`epochs` draws from one list, `success` by measured success, `mixture` from several lists by their weights.
"""
