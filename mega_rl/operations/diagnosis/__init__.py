"""Diagnose runs that hang or lose a rank, from records of ranks and this host's processes."""
