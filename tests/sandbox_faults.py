"""Faults of the sandbox for programs, for tests/planted_faults.py (see tests/fault_table.py)."""

from __future__ import annotations

from tests.fault import Table

SANDBOX: Table = {
    ("sandbox", "rewards/sandbox/test_seccomp.py"): [
        ("namespaces may be made by clone", "yield _IF_BITS, 0, 1, NEW_NAMESPACES", "yield _IF_BITS, 0, 1, 0")
    ],
    ("sandbox", "rewards/sandbox/test_local.py"): [
        ("the network of the host", '_COMMON = ("--unshare-pid", "--unshare-net",', '_COMMON = ("--unshare-pid",'),
        ("a root that can be written", '"--remount-ro", "/dev", "--remount-ro", "/",', ""),
        (
            "the memory of one process alone",
            "for pid in filter(str.isdigit, os.listdir(processes)):",
            'for pid in ("2",):',
        ),
    ],
    ("sandbox", "rewards/sandbox/test_hostile_programs.py"): [
        ("a judge that can be looked into", "prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)", "prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)"),
        (
            "a failed assert that tests have swallowed",
            "self._failed = self._failed or not value",
            "self._failed = False",
        ),
        (
            "StopIteration of a program ends a loop of the tests",
            "raise (RuntimeError if ends_loop else error)(str(value[1]))",
            "raise error(str(value[1]))",
        ),
    ],
    ("sandbox", "rewards/test_code.py"): [
        ("right output of a program that failed", "return outcome.succeeded and same_text(", "return same_text("),
        ("a tolerance of integers", 'is_decimal = "." in expected and', "is_decimal ="),
    ],
    ("sandbox", "rewards/sandbox/test_watch.py"): [
        (
            "the host's processes counted before bubblewrap changes the root",
            'if os.path.samestat(os.fstat(root), os.stat("/")):',
            "if not root:",
        ),
    ],
    ("sandbox", "rewards/sandbox/test_suites.py"): [
        (
            "a builtin taken from the program",
            "if not (hasattr(builtins, name) or name.startswith(",
            "if not (name.startswith(",
        ),
        ("a pass without an assert", "if not self._asserts:", "if self._asserts < 0:"),
    ],
}
