from __future__ import annotations

from mega_rl.cli.app import entry_point

if __name__ == "__main__":
    entry_point()
