"""Submission of batch scripts by the cluster's own sbatch."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence

from mega_rl.errors import RunError, UserError

SBATCH = ("sbatch", "--parsable")
SUBMIT_S = 120.0


def submit(script: str, *, program: Sequence[str] = SBATCH, wait_s: float = SUBMIT_S) -> int:
    """Submit a batch script and return the job's number.

    Raises UserError where sbatch is missing or refuses the job, RunError where it does not answer in `wait_s` seconds.
    """
    try:
        answer = subprocess.run(program, input=script, capture_output=True, text=True, timeout=wait_s, check=False)
    except FileNotFoundError:
        raise UserError(
            f"{program[0]}: is not installed here; submit from a login node, or without --submit the script is printed"
        ) from None
    except subprocess.TimeoutExpired:
        raise RunError(
            f"{program[0]} has not answered in {wait_s:.0f} s; see with squeue --me whether the job was submitted"
        ) from None
    if answer.returncode:
        words = " ".join(line.removeprefix("sbatch: error: ") for line in answer.stderr.strip().splitlines())
        raise UserError(f"{program[0]} has refused the job: {words or f'exit code {answer.returncode}'}")
    number = re.match(r"[0-9]+", answer.stdout, re.ASCII)
    if number is None:
        raise RunError(f"{program[0]} has printed no number of a job but {answer.stdout.strip()[:80]!r}")
    return int(number[0])
