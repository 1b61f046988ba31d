"""`python -m tests.fault_campaign --faults 1000`: a table of what became of every fault, and exit code 1 for a defect.

Linux, as root: control groups, mounts and network namespaces. `make campaign-faults`.
"""

from __future__ import annotations

import argparse
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
from tests.fault_campaign.faults import JUMPING_CLOCK, compiled
from tests.fault_campaign.judge import CONTINUED, NOT_FIRED, RESTARTED, STOPPED, Verdict
from tests.fault_campaign.plan import KINDS, cases
from tests.fault_campaign.storage_faults import FAILING_WRITES
from tests.fault_campaign.workers import Campaign, read_verdicts

PROGRAMS = ("gcc", "ip", "mount", "nft", "tc")
ROOT_VARIABLE = "FAULT_CAMPAIGN_ROOT"


def main() -> int:
    """Inject the faults and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, choices=range(1, 9), help="cases at a time")
    parser.add_argument("--kinds", nargs="*", default=[], help="only kinds that contain one of these words")
    parser.add_argument("--only", type=int, nargs="*", default=[], help="only the cases of these numbers")
    parser.add_argument("--keep", action="store_true", help="keep the folders of right cases, too")
    parser.add_argument("--json", type=Path, help="a line for each verdict, as it comes; a new file")
    parser.add_argument("--resume", type=Path, help="such a file of a campaign that was cut: add the verdicts it lacks")
    given = parser.parse_args()
    if os.geteuid():
        sys.exit("error: the campaign makes control groups and network namespaces: run it as root")
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        sys.exit(f"error: the campaign needs {', '.join(missing)}: apt-get install gcc iproute2 mount nftables")
    chosen = cases(given.seed, given.faults, kinds=tuple(given.kinds))
    chosen = [case for case in chosen if not given.only or case.number in given.only]
    root = preloaded()
    results = (given.resume or given.json or root / "results.jsonl").absolute()
    if given.json and (given.resume or given.json.exists()):
        sys.exit("error: --json is of a new file; go on with an old one by --resume")
    known = {verdict.number: verdict for verdict in read_verdicts(results)}
    if others := [case for case in chosen if case.number in known and known[case.number].case != case.title]:
        sys.exit(f"error: {results} is of other cases (seed, kinds, number of faults?): {others[0].title}")
    # In a process of its own: progress bars start a thread, and workers are forked from this one.
    subprocess.run([sys.executable, "-m", inputs.__name__, str(root / "inputs")], check=True, stderr=subprocess.DEVNULL)

    begin = time.monotonic()
    left = [case for case in chosen if case.number not in known]
    whole = Campaign(left, given.seed, root, results, workers=given.workers, keep=given.keep).run()
    verdicts = [verdict for verdict in read_verdicts(results) if verdict.number in {case.number for case in chosen}]
    print(table(verdicts))
    bad = [verdict for verdict in verdicts if verdict.defects]
    for verdict in bad:
        print(f"\n{verdict.case}\n  {verdict.witness}\n  " + "\n  ".join(verdict.defects) + f"\n  {verdict.last_line}")
    print(f"\n{len(verdicts)} faults, {len(bad)} defects, {time.monotonic() - begin:.0f} s; folders: {root}; {results}")
    if not whole:
        print(f"stopped: go on with --resume {results}")
    return 1 if bad or len(verdicts) < len(chosen) else 0


def preloaded() -> Path:
    """Return a new folder for the campaign; this process is replaced by one that has the libraries of the faults.

    A library does nothing until a case sets its variable.
    """
    if ROOT_VARIABLE in os.environ:
        return Path(os.environ.pop(ROOT_VARIABLE))
    root = Path(tempfile.mkdtemp(prefix="fault_campaign-"))
    libraries = [str(compiled(source, root)) for source in (FAILING_WRITES, JUMPING_CLOCK)]
    command = [sys.executable, "-m", __package__ or "", *sys.argv[1:]]
    os.execve(sys.executable, command, {**os.environ, "LD_PRELOAD": ":".join(libraries), ROOT_VARIABLE: str(root)})


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
