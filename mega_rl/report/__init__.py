"""A run's files as one HTML page without network: curves, phases, warnings, config differences, samples.

`runs` reads folders of runs, `curves` thins their metrics, `samples` picks dumped responses and values of their tokens,
`rules` looks for symptoms of docs/debugging.md, `document` puts the page together from the files of page/, and `server`
gives it out on the loopback address while a run goes on. Nothing here writes into a run.
"""
