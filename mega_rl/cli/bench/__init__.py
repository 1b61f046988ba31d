"""`mega-rl bench`."""

from __future__ import annotations

from mega_rl.cli.bench import learn
from mega_rl.cli.help import Commands

app = Commands(name="bench", help="Tasks that show whether the trainer learns.")
app.command("learn")(learn.learn)


@app.callback()
def _bench() -> None:
    """Tasks that show whether the trainer learns."""
