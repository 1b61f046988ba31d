"""`mega-rl train` as a script: --config X key=value ..., with plain python or under torchrun."""

from __future__ import annotations

import sys

from mega_rl.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
