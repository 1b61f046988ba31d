"""Start runs by Slurm, Kubernetes or Ray, with a launcher on every node."""
