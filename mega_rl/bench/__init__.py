"""Benchmarks of the product itself, as commands: `mega-rl bench learn`."""
