from __future__ import annotations

import pytest

from mega_rl.errors import UserError
from mega_rl.schedulers.slurm.hostlist import MAX_CHARACTERS, MAX_HOSTS, counts, expand


@pytest.mark.parametrize(
    ("expression", "hosts"),
    [
        ("login1", ["login1"]),
        ("a,b.cluster", ["a", "b.cluster"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("gpu[001-003,007],login1", ["gpu001", "gpu002", "gpu003", "gpu007", "login1"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[99-101]-ib", ["n99-ib", "n100-ib", "n101-ib"]),
        ("rack[1-2]n[01-02]", ["rack1n01", "rack1n02", "rack2n01", "rack2n02"]),
        ("[1-2]", ["1", "2"]),
        ("0x7f00000[1-2]", ["0x7f000001", "0x7f000002"]),
        ("n[2,1]", ["n2", "n1"]),
    ],
)
def test_hosts_are_those_that_slurm_means(expression: str, hosts: list[str]) -> None:
    assert expand(expression, what="SLURM_JOB_NODELIST") == hosts


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "is no list of hosts"),
        ("a,", "is no list of hosts"),
        (",a", "is no list of hosts"),
        ("a b", "is no list of hosts of Slurm from ' b' on"),
        ("a;reboot", "is no list of hosts"),
        ("n[1-3", "is no list of hosts"),
        ("n1-3]", "is no list of hosts"),
        ("n[[1]]", "is no list of hosts"),
        ("ä1", "is no list of hosts"),
        ("n[]", "is no number or range"),
        ("n[1-]", "is no number or range"),
        ("n[1-2-3]", "is no number or range"),
        ("n[a-b]", "is no number or range"),
        ("n[٣]", "is no number or range"),
        ("n[3-1]", "ends before it begins"),
        ("n[0-999999999]", f"more than {MAX_HOSTS} hosts"),
        ("n[0-9999999999]", "is no number or range"),
        ("a[1-300]b[1-300]", f"more than {MAX_HOSTS} hosts"),
        (",".join(["n[1-40000]", "m[1-40000]"]), f"more than {MAX_HOSTS} hosts"),
        ("n[1-2],n2", "names a host twice"),
        ("a" * (MAX_CHARACTERS + 1), "more than"),
    ],
)
def test_anything_else_is_refused_in_one_short_line(expression: str, message: str) -> None:
    with pytest.raises(UserError, match="SLURM_JOB_NODELIST") as raised:
        expand(expression, what="SLURM_JOB_NODELIST")
    assert message in str(raised.value)
    assert len(str(raised.value)) < 300


def test_counts_of_tasks_are_one_for_each_node() -> None:
    assert counts("2(x3),1", what="TASKS") == [2, 2, 2, 1]
    assert counts("8", what="TASKS") == [8]
    for text in ("", "2(x0)", "0", "2(x3", "-1", "2,", "2(x99999)"):
        with pytest.raises(UserError, match="TASKS="):
            counts(text, what="TASKS")
