"""Checkpoints in the hosts' memory: a normal checkpoint on a tmpfs, its shards also on the next host."""
