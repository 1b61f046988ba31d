"""Diagnose runs that hang or lose a rank, from the records of ranks and the processes of this host."""
