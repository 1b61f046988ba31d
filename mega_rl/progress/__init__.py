"""Work in progress: whoever does something that takes time says so here, and the command decides how it is shown.

Works as logging does. Code that loads, generates or saves opens a phase and knows nothing of terminals; without a
listener (in a library, in tests, on ranks other than 0) nothing is shown. Imports the standard library only.
"""

from mega_rl.progress.phases import (
    Listener,
    Phase,
    active,
    active_at,
    begin,
    close,
    counter,
    importing,
    listen,
    note,
    phase,
    report,
    rounds,
)  # fmt: skip

__all__ = [
    "Listener", "Phase", "active", "active_at", "begin", "close", "counter", "importing", "listen", "note", "phase",
    "report", "rounds", "show_progress",
]  # fmt: skip


def show_progress(*, live: bool = True) -> None:
    """Show phases and logs on this terminal, as `terminal.show_progress`, which brings rich in."""
    from mega_rl.progress import terminal

    terminal.show_progress(live=live)
