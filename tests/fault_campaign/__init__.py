"""Faults injected into real runs at random points; every run must go on, restart bit-equal, or stop with its cause."""
