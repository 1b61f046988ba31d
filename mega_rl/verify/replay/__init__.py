"""`mega-rl replay`: a recorded step computed again, under another layout or engine."""
