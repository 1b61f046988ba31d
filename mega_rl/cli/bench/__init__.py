"""`mega-rl bench`."""

from __future__ import annotations

from mega_rl.cli.bench import judge, learn
from mega_rl.cli.help import Commands

app = Commands(name="bench", help="Tasks that show whether the trainer learns.")
app.command("learn")(learn.learn)
app.command("judge")(judge.judge)
