"""Tasks of srun that start ranks themselves are not taken for separate runs."""

from __future__ import annotations

import os

import pytest

from mega_rl.errors import UserError
from mega_rl.plan.preflight.host import refuse_tasks_of_srun

JOB = {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "8"}
STEP = {**JOB, "SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8"}


def in_environment(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name in ("RANK", *(name for name in os.environ if name.startswith("SLURM_"))):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    "environment",
    [
        STEP,
        {**STEP, "SLURM_PROCID": "5"},
        {**STEP, "SLURM_NTASKS": "1"},
    ],
)
def test_one_of_several_tasks_is_refused(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    in_environment(monkeypatch, environment)
    with pytest.raises(UserError, match=r"srun started 8 tasks, .* as a rank"):
        refuse_tasks_of_srun()


@pytest.mark.parametrize(
    "environment",
    [
        {},
        JOB,
        {**STEP, "SLURM_STEP_NUM_TASKS": "1"},
        {**STEP, "RANK": "3"},
        {**JOB, "SLURM_PROCID": "0"},
    ],
    ids=["no Slurm", "salloc", "one task in a larger job", "torchrun", "batch script"],
)
def test_other_starts_are_accepted(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    in_environment(monkeypatch, environment)
    refuse_tasks_of_srun()
