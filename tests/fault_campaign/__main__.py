"""`python -m tests.fault_campaign --faults 1000`: a table of what became of every fault, and exit code 1 for a defect.

Linux, as root: control groups, mounts and network namespaces. `make campaign-faults`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.fault_campaign import inputs
from tests.fault_campaign.judge import CONTINUED, NOT_FIRED, RESTARTED, STOPPED, Judge, Verdict
from tests.fault_campaign.plan import KINDS, Case, cases


def main() -> int:
    """Inject the faults and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="cases at a time")
    parser.add_argument("--kinds", nargs="*", default=[], help="only kinds that contain one of these words")
    parser.add_argument("--only", type=int, nargs="*", default=[], help="only the cases of these numbers")
    parser.add_argument("--keep", action="store_true", help="keep the folders of right cases, too")
    parser.add_argument("--json", type=Path, help="a line for each verdict")
    given = parser.parse_args()
    if os.geteuid():
        sys.exit("error: the campaign makes control groups and network namespaces: run it as root")
    chosen = cases(given.seed, given.faults, kinds=tuple(given.kinds))
    chosen = [case for case in chosen if not given.only or case.number in given.only]
    root = Path(tempfile.mkdtemp(prefix="fault_campaign_"))
    # In a process of its own: progress bars start a thread, and what ranks are forked from may have none.
    subprocess.run([sys.executable, "-m", inputs.__name__, str(root / "inputs")], check=True, stderr=subprocess.DEVNULL)
    results = root / "results.jsonl"
    results.touch()
    import tests.fault_campaign.preload  # noqa: F401 - what ranks are forked from

    begin = time.monotonic()
    work(chosen, root, results, seed=given.seed, workers=given.workers, keep=given.keep)
    verdicts = [Verdict(**json.loads(line)) for line in results.read_text().splitlines()]
    if given.json:
        shutil.copy(results, given.json)
    print(table(verdicts))
    bad = [verdict for verdict in verdicts if verdict.defects]
    for verdict in bad:
        print(f"\n{verdict.case}\n  {verdict.witness}\n  " + "\n  ".join(verdict.defects) + f"\n  {verdict.last_line}")
    print(f"\n{len(verdicts)} faults, {len(bad)} defects, {time.monotonic() - begin:.0f} s; folders: {root}")
    return 1 if bad or len(verdicts) < len(chosen) else 0


def work(chosen: Sequence[Case], root: Path, results: Path, *, seed: int, workers: int, keep: bool) -> None:
    """Run the cases in `workers` processes, each of which takes every so manieth one."""
    pids = []
    for worker in range(workers):
        pid = os.fork()
        if not pid:
            try:
                judge = Judge(root, worker=worker, keep=keep)
                for case in chosen[worker::workers]:
                    verdict = judge.run(case, seed)
                    with results.open("a") as file:
                        file.write(json.dumps(verdict.as_json()) + "\n")
                    mark = "DEFECT " + "; ".join(verdict.defects) if verdict.defects else verdict.outcome
                    print(f"{verdict.case}: {mark} ({verdict.seconds:.1f} s)", flush=True)
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stdout.flush()
                os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)


def table(verdicts: Sequence[Verdict]) -> str:
    """Return the outcomes by kind of fault as a table."""
    rows = ["| fault | cases | continued | restarted, bit-equal | stopped with its cause | not fired | defects |"]
    rows.append("|---|---|---|---|---|---|---|")
    for kind in [*KINDS, "all"]:
        some = [verdict for verdict in verdicts if kind in (verdict.kind, "all")]
        count = Counter(verdict.outcome for verdict in some if not verdict.defects)
        numbers = [count[outcome] for outcome in (CONTINUED, RESTARTED, STOPPED, NOT_FIRED)]
        defects = sum(bool(verdict.defects) for verdict in some)
        if some:
            rows.append(f"| {kind} | {len(some)} | {' | '.join(map(str, numbers))} | {defects} |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
