"""A run's files as one HTML page without network: curves, phases, warnings, config differences, samples.

`runs` reads folders of runs, `content` makes the page's data (with `symptoms`), `page` puts data and the
files of assets/ together. Nothing here writes into a run.
"""
