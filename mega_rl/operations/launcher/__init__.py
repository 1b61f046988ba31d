"""Start the ranks of a run on its nodes, watch them, end them and restart them.

The launcher of each node has the ranks of its node as children. The launcher of node 0 decides for all nodes
(`supervisor`); the launchers of the other nodes follow it (`launch.follow`).
"""
