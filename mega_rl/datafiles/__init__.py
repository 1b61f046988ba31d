"""Published problem sets as JSONL files: what `mega-rl data` writes.

`problems` names the sets and how a row becomes a prompt and an answer, `writing` downloads and writes them. Must not
import `quickstart` or `verify`, which are on its layer; nothing that trains imports this package.
"""
