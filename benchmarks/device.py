"""Figures of one GPU in half an hour: tests, products, steps, head, gradient sums, host copies, IPC, rollouts, a run.

    python benchmarks/device.py --json device.json          # every part, at most 8 minutes each
    python benchmarks/device.py head offload                # some parts
    python benchmarks/device.py --tiny                      # the same code on a CPU in seconds: proves it, not a figure

A part is a process of its own, so that its memory is gone when it ends; it prints JSON lines. Beside each value stands
what was expected of it before any device ran it (`EXPECTED`). The exit code is 1 when a part failed or overran.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT_S = 480  # of a part
TINY_LIMIT_S = 240  # of all parts together
# Module of each part, in the order in which half an hour is best spent.
PARTS = {
    "machine": "device_micro",
    "tests": "device_runs",
    "step": "device_engine",
    "head": "device_micro",
    "sums": "device_micro",
    "offload": "device_micro",
    "ipc": "device_micro",
    "rollout": "device_engine",
    "run": "device_runs",
    "suite": "device_runs",
}


@dataclass(frozen=True)
class Expected:
    """An expectation of one figure of an H200, written down on 2026-11-23, before any run on one."""

    part: str
    key: str
    low: float | None
    high: float | None
    why: str

    def __str__(self) -> str:
        bounds = [
            f">= {self.low:g}" if self.low is not None else "",
            f"<= {self.high:g}" if self.high is not None else "",
        ]
        return " and ".join(bound for bound in bounds if bound)

    def holds(self, value: float) -> bool:
        """Return whether a value is within the bounds."""
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


EXPECTED = (
    Expected("machine", "bf16_tflops", 600, None, "a product of 8192 x 8192 bf16 matrices; the peak is 989"),
    Expected("machine", "copy_tb_s", 3.5, None, "reads and writes of a copy of 4 GB; the peak is 4.8"),
    Expected(
        "tests", "failed", None, 0, "what needs a GPU: handles, memory of logits, packing, one GPU against the CPU"
    ),
    Expected("step", "mfu", 0.40, None, "training of 1.7B and 4B at 8k and 16k tokens without Transformer Engine"),
    Expected("head", "over_gemm", None, 2.0, "log-probs forward and backward against the products of the output layer"),
    Expected("head", "peak_bytes_per_logit", None, 2.6, "bf16 logits, whose memory the gradient takes over"),
    Expected("sums", "of_copy", 0.6, None, "bandwidth of the FP32 sum against that of a copy"),
    Expected("offload", "pinned_off_gb_s", 45, None, "PCIe 5 x16 into kept, pinned memory"),
    Expected("offload", "kept_off_gb_s", 45, None, "the engine's own copies, into places made before"),
    Expected("ipc", "gb_s", 20, None, "a bucket of 256 MiB handed to another process and copied there"),
    Expected("ipc", "left_bytes", None, 0, "all shared memory is free again"),
    Expected("rollout", "ms_per_token", 10, 25, "the embedded engine at 0.6B: bound by launches"),
    Expected("rollout", "mismatch_mean", None, 0.02, "nats between rollout and trainer in bf16"),
    Expected("run", "grad_norm_difference", None, 0.01, "the first step of GRPO in FP32 on the device against the CPU"),
    Expected("suite", "failed", None, 0, "all unit tests where a GPU is visible"),
)


def run_parts(parts: Sequence[str], *, tiny: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """Run parts in fresh processes; return (records, failures in words)."""
    records: list[dict[str, Any]] = []
    failures: list[str] = []
    groups = [list(parts)] if tiny else [[part] for part in parts]
    for group in groups:
        limit = TINY_LIMIT_S if tiny else LIMIT_S
        lines, failure = _run(group, tiny=tiny, limit_s=limit)
        records += lines
        if failure:
            failures.append(f"{', '.join(group)}: {failure}")
    return records, failures


def _run(parts: Sequence[str], *, tiny: bool, limit_s: float) -> tuple[list[dict[str, Any]], str]:
    command = [sys.executable, "-W", "ignore", __file__, "--worker", *(["--tiny"] if tiny else []), *parts]
    root = str(Path(__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}
    if tiny:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    begin, records = time.monotonic(), []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        limit = threading.Timer(limit_s, process.kill)
        limit.start()
        for line in process.stdout:
            if line.startswith('{"part"'):
                records.append(json.loads(line))
                print(line, end="", file=sys.stderr, flush=True)  # a machine that is lent may be gone before the table
        limit.cancel()
    if not process.returncode:
        return records, ""
    overran = time.monotonic() - begin >= limit_s
    return records, f"stopped after {limit_s:g} s" if overran else f"exit code {process.returncode}"


def table(records: Sequence[dict[str, Any]], *, judge: bool) -> str:
    """Return the records as a Markdown table: part, case, figures, and with `judge` how expectations came out."""
    lines = ["| part | case | figures | expected on an H200 |", "|---|---|---|---|"]
    for record in records:
        figures = {key: value for key, value in record.items() if isinstance(value, int | float)}
        case = ", ".join(f"{value}" for key, value in record.items() if key != "part" and key not in figures)
        shown = ", ".join(f"{key} {value:.4g}" for key, value in figures.items())
        lines.append(f"| {record['part']} | {case} | {shown} | {_expectations(record) if judge else ''} |")
    return "\n".join(lines)


def _expectations(record: dict[str, Any]) -> str:
    about = [one for one in EXPECTED if one.part == record["part"] and one.key in record]
    return "; ".join(f"{one.key} {one}: {'yes' if one.holds(record[one.key]) else 'NO'}" for one in about)


def work(parts: Sequence[str], *, tiny: bool) -> None:
    """Run parts in this process, one JSON line a record."""
    import importlib

    for part in parts:
        for record in getattr(importlib.import_module(PARTS[part]), part)(tiny=tiny):
            print(json.dumps({"part": part, **record}), flush=True)


def main() -> int:
    """Print the table; exit code 1 when a part failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all of them without any")
    parser.add_argument("--tiny", action="store_true", help="small shapes on a CPU: a test of the program")
    parser.add_argument("--json", type=Path, help="write every record here")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := [part for part in arguments.parts if part not in PARTS]:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    parts = arguments.parts or list(PARTS)
    if arguments.worker:
        work(parts, tiny=arguments.tiny)
        return 0
    records, failures = run_parts(parts, tiny=arguments.tiny)
    print(table(records, judge=not arguments.tiny))
    for failure in failures:
        print(f"failed: {failure}")
    if arguments.json:
        result = {"date": datetime.date.today().isoformat(), "records": records, "failures": failures}
        arguments.json.write_text(json.dumps(result, indent=1))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
