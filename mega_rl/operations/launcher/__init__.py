"""Start the ranks of a run on its nodes, watch them, end and restart them; the launcher of node 0 decides for all."""
