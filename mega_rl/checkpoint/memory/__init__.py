"""Checkpoints in the hosts' memory, on a tmpfs and on the next host's."""
