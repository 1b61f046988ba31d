"""Rollouts over several servers: the engine, the router with its generations, the servers' states, the client."""
