"""Faults of the sandbox for programs, for tests/planted_faults.py (see tests/fault_table.py)."""

from __future__ import annotations

from tests.fault import fault

LOCAL = "sandbox/test_local.py"
CASES = "workers/code/test_cases.py"

SANDBOX = (
    fault(
        "sandbox",
        "namespaces may be made by clone",
        "yield _IF_BITS, 0, 1, NEW_NAMESPACES",
        "yield _IF_BITS, 0, 1, 0",
        "sandbox/test_seccomp.py",
    ),
    fault(
        "sandbox",
        "the network of the host",
        '_COMMON = ("--unshare-pid", "--unshare-net",',
        '_COMMON = ("--unshare-pid",',
        LOCAL,
    ),
    fault("sandbox", "a root that can be written", '"--remount-ro", "/dev", "--remount-ro", "/",', "", LOCAL),
    fault(
        "sandbox",
        "the memory of one process alone",
        "            tree += _children(process, pid)\n",
        "",
        LOCAL,
    ),
    fault(
        "sandbox",
        "a judge that can be looked into",
        "prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)",
        "prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)",
        "sandbox/test_hostile_programs.py",
    ),
    fault(
        "sandbox",
        "an equal of everything",
        'return isinstance(other, Remote) and operate(self, "__eq__", other) is True',
        'return operate(self, "__eq__", other) is True',
        CASES,
    ),
    fault(
        "sandbox",
        "right output of a program that failed",
        "return outcome.succeeded and same_text(",
        "return same_text(",
        CASES,
    ),
)
