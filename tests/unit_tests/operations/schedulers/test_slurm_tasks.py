from __future__ import annotations

import pytest

from mega_rl.errors import UserError
from mega_rl.operations.schedulers.slurm import FIRST_PORT, NUM_PORTS, become_rank, first_host

STEP = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "1",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "64",  # of the job; the step has 8
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}


def test_task_becomes_the_rank_of_its_place() -> None:
    environment = {**STEP, "WORLD_SIZE": "64"}
    become_rank(environment)
    assert {name: environment[name] for name in environment if name not in STEP} == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": str(FIRST_PORT + 17 + 97),
    }
    assert FIRST_PORT + NUM_PORTS < 32_768, "ports of outgoing connections"


def test_address_set_by_a_script_stays() -> None:
    environment = {**STEP, "MASTER_ADDR": "gpu07-ib", "MASTER_PORT": "29500"}
    become_rank(environment)
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"], environment["RANK"]) == ("gpu07-ib", "29500", "5")


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {**STEP, "RANK": "0"},
        {**STEP, "SLURM_STEP_NUM_TASKS": "1"},
        {name: value for name, value in STEP.items() if name != "SLURM_STEP_ID"},
        {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "8"},
    ],
    ids=["no Slurm", "a launcher's rank", "one task", "batch script", "salloc"],
)
def test_other_environments_stay_unchanged(environment: dict[str, str]) -> None:
    before = dict(environment)
    become_rank(environment)
    assert environment == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SLURM_LOCALID": ""}, "SLURM_LOCALID=''"),
        ({"SLURM_STEP_NUM_TASKS": "eight"}, "SLURM_STEP_NUM_TASKS='eight'"),
        ({"SLURM_STEP_NUM_TASKS": "7"}, "--ntasks-per-node"),
        ({"SLURM_LOCALID": "2"}, "--distribution=block"),
        ({"SLURM_STEP_NODELIST": "gpu[07-"}, "SLURM_STEP_NODELIST=gpu[07-: is not a list of hosts"),
    ],
)
def test_tasks_that_cannot_be_ranks_are_a_mistake(changes: dict[str, str], message: str) -> None:
    environment = {**STEP, **changes}
    with pytest.raises(UserError) as raised:
        become_rank(environment)
    assert message in str(raised.value)
    assert environment == {**STEP, **changes}


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("a,b.cluster", "a"),
        ("gpu[001-003,007],login1", "gpu001"),
        ("n[99-101]-ib", "n99-ib"),
        ("rack[1-2]n[01-02]", "rack1n01"),
        ("n[1-2]," + "x" * 10_000, "n1"),
        *((hosts, "") for hosts in ("", ",a", "a;reboot", "n[1-3", "n[[1]]", "ä1", "n[a-b]", "n[٣]")),
    ],
)
def test_first_host_of_a_list_is_found(hosts: str, first: str) -> None:
    if first:
        assert first_host(hosts) == first
        return
    with pytest.raises(UserError, match="is not a list of hosts of Slurm"):
        first_host(hosts)
