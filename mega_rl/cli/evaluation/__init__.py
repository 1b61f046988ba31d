"""`mega-rl eval`."""
