"""Runs by Slurm: batch scripts with a launcher on each node, and tasks of srun as ranks."""
