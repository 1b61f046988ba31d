"""Slurm: batch scripts that start launchers, and tasks of srun that are ranks."""
