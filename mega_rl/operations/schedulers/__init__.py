"""Start runs by the scheduler of a cluster: Slurm, Kubernetes or Ray. Each starts a launcher on every node."""
