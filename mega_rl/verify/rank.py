"""One rank of a verification: `python -m mega_rl.verify.rank TASK`, started by `mega_rl.verify.launcher`."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from importlib import import_module
from pathlib import Path

from mega_rl.errors import UserError
from mega_rl.parallel.accelerator import prepare


def main(path: str) -> int:
    """Run the task in a file; returns the exit code, 2 for a user's mistake."""
    logging.basicConfig(level=logging.WARNING)
    warnings.simplefilter("ignore")
    try:
        accelerator = prepare("auto")
        ((name, arguments),) = json.loads(Path(path).read_text(encoding="utf-8")).items()
        module = import_module(f"mega_rl.verify.{name}")  # imports Megatron-Core
        module.run_task(arguments, accelerator)
    except UserError as error:
        sys.stderr.write("error: " + " ".join(str(error).split("\n")) + "\n")
        return UserError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
