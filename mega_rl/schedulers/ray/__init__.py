"""Runs on the nodes of a Ray cluster: `driver` decides, `placement` talks to Ray, `node` starts a node's launcher."""
