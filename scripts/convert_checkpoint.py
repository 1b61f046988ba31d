"""`mega-rl convert` as a script: a verb and its arguments."""

from __future__ import annotations

import sys

from mega_rl.cli.app import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
