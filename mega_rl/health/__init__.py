"""Diagnosis of runs that hang or lose a rank: records of ranks, stacks, the lagging rank and the likely cause.

`heartbeat` keeps a rank's record, `records` reads those of all, `stacks` and `processes` look at this host's ranks,
`diagnosis` names the cause, `report` writes it down, `watch` says that a run stands still, `overview` shows a live one.
No torch but in `flight_recorder`, which knows a rank's
collectives.
"""
