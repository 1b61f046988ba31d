"""Data files of runs: published problem sets as JSONL, and an overview of the prompts of a recipe.

`problems` names the sets and how a row becomes a prompt and an answer, `writing` downloads and writes them, `overview`
reads the prompts of a run as the run does. Must not
import `quickstart` or `verify`, which are on its layer; nothing that trains imports this package.
"""
