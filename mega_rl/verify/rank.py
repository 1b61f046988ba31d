"""One rank of a verification: `python -m mega_rl.verify.rank PLAN`, started by `mega_rl.verify.launcher`."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path

from mega_rl.accelerator import prepare
from mega_rl.errors import UserError
from mega_rl.verify.plan import Plan


def main(path: str) -> int:
    """Measures what the plan at `path` asks for; returns the exit code, 2 where a model cannot be cut so."""
    logging.basicConfig(level=logging.WARNING)
    warnings.simplefilter("ignore")
    plan = Plan.read(Path(path))
    try:
        accelerator = prepare("auto")
        from mega_rl.verify.case import measure  # after prepare: it brings Megatron-Core in

        measure(plan, accelerator)
    except UserError as error:
        sys.stderr.write("error: " + " ".join(str(error).split("\n")) + "\n")
        return UserError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
