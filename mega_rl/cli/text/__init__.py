"""Lines that commands print."""
