"""Records of a rank about itself: a heartbeat, its last words, the collectives in flight."""
