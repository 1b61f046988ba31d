from __future__ import annotations

import pytest

from mega_rl.errors import UserError
from mega_rl.operations.schedulers.slurm_tasks import (
    FIRST_PORT,
    NUM_PORTS,
    become_rank,
    first_host,
    is_one_of_several,
)

STEP = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "1",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "64",  # of the job; the step has 8
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}


def test_task_becomes_the_rank_of_its_place() -> None:
    environment = dict(STEP)
    become_rank(environment)
    assert {name: environment[name] for name in environment if name not in STEP} == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": str(FIRST_PORT + 17 + 97),
    }


@pytest.mark.parametrize("job", ["1", "40000", "4294967294"])
def test_ports_are_below_those_of_outgoing_connections(job: str) -> None:
    environment = {**STEP, "SLURM_JOB_ID": job}
    become_rank(environment)
    assert FIRST_PORT <= int(environment["MASTER_PORT"]) < FIRST_PORT + NUM_PORTS < 32_768


def test_address_set_by_a_script_stays() -> None:
    environment = {**STEP, "MASTER_ADDR": "gpu07-ib", "MASTER_PORT": "29500", "WORLD_SIZE": "8"}
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
    assert not is_one_of_several(environment)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SLURM_LOCALID": ""}, "without SLURM_LOCALID"),
        ({"SLURM_PROCID": "8"}, "SLURM_PROCID='8': needs a whole number from 0 to 7"),
        ({"SLURM_STEP_NUM_TASKS": "6"}, "SLURM_PROCID=5: is not task 1 of node 1 with 4(x2) tasks"),
        ({"SLURM_STEP_NODELIST": "gpu[07-"}, "SLURM_STEP_NODELIST=gpu[07-: is not a list of hosts"),
        ({"SLURM_STEP_TASKS_PER_NODE": "5,3"}, "every node needs the same number of ranks"),
        ({"SLURM_LOCALID": "2"}, "--distribution=block"),
        ({"WORLD_SIZE": "64"}, "environment variable WORLD_SIZE=64: this task of srun is rank 5 of 8"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK=1; unset it"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http'"),
    ],
)
def test_contradicting_variables_are_a_mistake(changes: dict[str, str], message: str) -> None:
    environment = {**STEP, **changes}
    with pytest.raises(UserError) as raised:
        become_rank(environment)
    assert message in str(raised.value)
    assert environment == {**STEP, **changes}


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("login1", "login1"),
        ("a,b.cluster", "a"),
        ("n[1-3]", "n1"),
        ("gpu[001-003,007],login1", "gpu001"),
        ("n[99-101]-ib", "n99-ib"),
        ("rack[1-2]n[01-02]", "rack1n01"),
        ("[1-2]", "1"),
        ("n[2,1]", "n2"),
        ("n[1-2]," + "x" * 10_000, "n1"),
    ],
)
def test_first_host_of_a_list_is_found(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


@pytest.mark.parametrize(
    "hosts", ["", ",a", "a b", "a;reboot", "n[1-3", "n1-3]", "n[[1]]", "ä1", "n[]", "n[-1]", "n[a-b]", "n[٣]"]
)
def test_other_lists_are_refused_in_one_line(hosts: str) -> None:
    with pytest.raises(UserError, match="is not a list of hosts of Slurm"):
        first_host(hosts)
