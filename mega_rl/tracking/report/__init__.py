"""A run's files as one HTML page without network: curves, phases, warnings, config differences, samples.

`runs` reads folders of runs, `content` makes the page's data (with `samples` and `symptoms`), `page` puts data and the
files of assets/ together, and `server` serves the page of a live run. Nothing here writes into a run.
"""
