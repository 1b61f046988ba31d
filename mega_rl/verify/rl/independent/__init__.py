"""A second trainer from the papers, in plain torch and transformers, to check the real trainer.

It imports nothing of mega_rl. Rows are lists, formulas are loops over them in float64, and nothing is packed, cut over
ranks or cached: slow, and short enough to be read against the papers.
"""
