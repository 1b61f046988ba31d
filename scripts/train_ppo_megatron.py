"""`mega-rl train` as a script: --config X key=value ..., with plain python or under torchrun."""

from __future__ import annotations

import sys

from mega_rl.cli.app import entry_point

if __name__ == "__main__":
    entry_point(["train", *sys.argv[1:]])
