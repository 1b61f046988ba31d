"""Records of a rank about itself: a heartbeat, its last words, the collectives in flight.

`heartbeat` writes a rank's record, `guard` its last words, `flight_recorder` knows its collectives. Launchers and the
doctor read the records (`mega_rl.operations.diagnosis`).
"""
