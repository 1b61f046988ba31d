"""Workers that run the cases: one that fails loses a case at most, and what any of them leaves is cleared away."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tests.fault_campaign.control_groups import ControlGroup, leftover_groups
from tests.fault_campaign.judge import DEFECT, Judge, Verdict, tag_of
from tests.fault_campaign.plan import Case
from tests.fault_campaign.storage_faults import unmount_below

CASE_S = 900.0  # of one case, the starts of clusters and servers among them: beyond every deadline inside it
END_S = 60.0  # in which a worker that was told to stop has closed what it opened


class Stop(BaseException):
    """The campaign was told to stop."""


@dataclass
class Campaign:
    """Cases, the folder they run in, and the file that gets a line for each verdict as it comes."""

    cases: Sequence[Case]
    seed: int
    root: Path
    results: Path
    workers: int
    keep: bool

    def run(self) -> bool:
        """Run all cases; returns whether it got to their end. SIGINT and SIGTERM stop it, cleaned up."""
        (self.root / "claims").mkdir()
        running = {self._start(number): number for number in range(self.workers)}
        try:
            for signum in (signal.SIGINT, signal.SIGTERM):
                signal.signal(signum, _stop)
            while running:
                pid, status = os.waitpid(-1, 0)
                number = running.pop(pid, None)
                if number is None or not status:
                    continue
                self._lost(number, f"its worker ended with {os.waitstatus_to_exitcode(status)}")
                running[self._start(number)] = number
        except Stop:
            return False
        finally:
            for signum in (signal.SIGINT, signal.SIGTERM):
                signal.signal(signum, signal.SIG_IGN)
            _end(list(running))
            sweep(self.root, "")
        return True

    def _start(self, worker: int) -> int:
        """Fork a worker; returns its process."""
        parent = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
            for signum in (signal.SIGINT, signal.SIGTERM):
                signal.signal(signum, _stop)
            signal.signal(signal.SIGALRM, _too_long)
            if os.getppid() == parent:
                self._work(worker)
            code = 0
        except Stop:
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)

    def _work(self, worker: int) -> None:
        judge = Judge(self.root, worker=worker, keep=self.keep)
        try:
            for case in in_order(self.cases, worker, self.workers):
                if self._claim(case, worker):
                    self._record(self._judge(judge, case, worker))
                if not case.cluster:
                    judge.close()  # a cluster's cases come first
        finally:
            judge.close()

    def _judge(self, judge: Judge, case: Case, worker: int) -> Verdict:
        """Return the verdict on a case; an error of the campaign is one, too."""
        begin = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, CASE_S)
        try:
            return judge.run(case, self.seed)
        except Exception as error:
            signal.setitimer(signal.ITIMER_REAL, 0)
            place = traceback.extract_tb(error.__traceback__)[-1]
            ours = [one for one in traceback.extract_tb(error.__traceback__) if "fault_campaign" in one.filename]
            place = ours[-1] if ours else place
            said = f"{type(error).__name__} in {Path(place.filename).name}:{place.lineno}: {str(error)[-600:]}"
            sweep(self.root, f"{worker}-")
            return failed(case, said, time.monotonic() - begin)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _claim(self, case: Case, worker: int) -> bool:
        """Return whether the case is this worker's, which no other takes then."""
        try:
            with (self.root / "claims" / str(case.number)).open("x") as file:
                file.write(str(worker))
        except FileExistsError:
            return False
        return True

    def _lost(self, worker: int, why: str) -> None:
        """Record the case that a worker had claimed when it ended, and clear away what it left."""
        sweep(self.root, f"{worker}-")
        done = {verdict.number for verdict in read_verdicts(self.results)}
        for case in self.cases:
            claim = self.root / "claims" / str(case.number)
            if case.number not in done and claim.exists() and claim.read_text() == str(worker):
                self._record(failed(case, why, 0.0))

    def _record(self, verdict: Verdict) -> None:
        descriptor = os.open(self.results, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            file.write(json.dumps(verdict.as_json()).encode() + b"\n")  # one write: workers share the file
        verdicts = read_verdicts(self.results)
        defects = sum(bool(one.defects) for one in verdicts)
        mark = "DEFECT " + "; ".join(verdict.defects) if verdict.defects else verdict.outcome
        print(f"[{len(verdicts)} done, {defects} defects] {verdict.case}: {mark} ({verdict.seconds:.1f} s)", flush=True)


def in_order(cases: Sequence[Case], worker: int, workers: int) -> list[Case]:
    """Return the cases that a worker may take, in order: those of a cluster belong to one worker, and come first."""
    owner = {name: number % workers for number, name in enumerate(("slurm", "ray", "sglang"))}
    own = [case for case in cases if case.cluster and owner[case.cluster] == worker]
    return sorted(own, key=lambda case: case.cluster) + [case for case in cases if not case.cluster]


def failed(case: Case, why: str, seconds: float) -> Verdict:
    """Return the verdict on a case in which the campaign itself failed."""
    return Verdict(
        case.number, case.title, case.fault.kind, DEFECT, "", "", round(seconds, 2), 1, (f"campaign: {why}",)
    )


def read_verdicts(path: Path) -> list[Verdict]:
    """Return the verdicts in a file; a line that was cut is none."""
    verdicts = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            verdicts.append(Verdict(**{**(record := json.loads(line)), "defects": tuple(record["defects"])}))
        except (ValueError, TypeError, KeyError):
            continue
    return verdicts


def sweep(root: Path, prefix: str) -> None:
    """Kill and remove whatever runs of a campaign are left, of one worker or (with an empty prefix) of all."""
    for controller, name in leftover_groups(f"{root.name}-{prefix}"):
        ControlGroup(controller, name).close()
    if not prefix:
        unmount_below(root)
    for namespace in Path("/run/netns").glob(f"mega{tag_of(root)}{prefix.rstrip('-')}*"):
        subprocess.run(["ip", "netns", "del", namespace.name], check=False)


def _end(pids: Sequence[int]) -> None:
    """Tell workers to stop and wait for them."""
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + END_S
    for pid in pids:
        while not os.waitpid(pid, os.WNOHANG)[0]:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)


def _stop(*_: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one is enough: what it interrupts is being closed
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise Stop


def _too_long(*_: object) -> NoReturn:
    raise TimeoutError(f"the case is not over after {CASE_S:g} s")
