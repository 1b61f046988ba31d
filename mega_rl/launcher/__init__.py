"""Supervisor of a run's ranks, on one node or several: starts them, watches them, ends them, starts them again.

A launcher of a node has the ranks of that node as its children. The launcher of node 0 decides for all nodes
(`supervisor`), those of the others follow (`member`). No torch is imported but in the process of the ranks' store.
"""
