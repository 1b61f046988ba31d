"""Rollouts over several servers: the engine, the router, the scheduler of samples, health of replicas."""
