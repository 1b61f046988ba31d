"""Reward functions in processes of their own, so that a response that hangs or crashes one costs that response alone.

`program` is what a worker runs, `process` its handle in the rank, `pool` shares responses out among the workers, and
`scorer` makes scores of what they return. `program` imports no torch.
"""
