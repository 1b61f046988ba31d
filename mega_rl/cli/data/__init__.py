"""`mega-rl data`."""
