"""The `mega-rl` command, one module per command: `app` joins them."""
