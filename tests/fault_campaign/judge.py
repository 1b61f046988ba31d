"""Verdict on a case: continued, restarted bit-equal, stopped with its cause and resumed bit-equal; or a defect."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random

from mega_rl.disk import lock_file
from tests.fault_campaign import inputs
from tests.fault_campaign.clusters import ClusterRun, Ray, Slurm, start
from tests.fault_campaign.control_groups import ControlGroup
from tests.fault_campaign.faults import Fault
from tests.fault_campaign.inputs import LAYOUTS, STEPS
from tests.fault_campaign.network_faults import BadService
from tests.fault_campaign.plan import Case
from tests.fault_campaign.runs import Run, last_line, weights
from tests.fault_campaign.server_faults import LostServer, LyingServer
from tests.fault_campaign.servers import SglangServer
from tests.fault_campaign.storage_faults import unmount_below
from tests.two_hosts import HOSTS, INTERFACE, hosts

START_S = 300.0
RELEASE_S = 20.0  # in which the kernel takes down the threads of a killed process, with what they hold
CONTINUED, RESTARTED, STOPPED, NOT_FIRED = "continued", "restarted", "stopped", "not fired"
DEFECT = "none"  # of the ends that are right
ATTEMPTS = 3  # at a fault that came too late to hit its run, each earlier than the one before
KEY = "MEGA_RL_LAUNCH_KEY"


@dataclass(frozen=True)
class Verdict:
    """How a case ended; defects: empty for a right end. attempts: runs until the fault had something to hit."""

    number: int
    case: str
    kind: str
    outcome: str
    witness: str
    last_line: str
    seconds: float
    attempts: int
    defects: tuple[str, ...]

    def as_json(self) -> dict[str, object]:
        """Return the verdict as JSON carries it."""
        return asdict(self)


class Judge:
    """Runs cases in folders below `root`, against the weights of undisturbed runs, which it makes when they are due."""

    def __init__(self, root: Path, *, worker: int, keep: bool = False) -> None:
        self._root, self._worker, self._keep = root, worker, keep
        self._right: dict[str, str] = {}
        self._cases_share: dict[str, Slurm | Ray | SglangServer] = {}

    def run(self, case: Case, seed: int) -> Verdict:
        """Inject the fault of a case and judge what follows; a fault that hit nothing is injected again, earlier."""
        begin = time.monotonic()
        verdict = self._run(case, Random(f"{seed}/{case.number}/run"))
        attempts = 1
        while not verdict.defects and verdict.outcome == NOT_FIRED and attempts < ATTEMPTS:
            case = replace(case, step=max(1, case.step // 2), delay_s=0.0)
            verdict = self._run(case, Random(f"{seed}/{case.number}/run"))
            attempts += 1
        return replace(verdict, attempts=attempts, seconds=round(time.monotonic() - begin, 2))

    def close(self) -> None:
        """End what cases share."""
        while self._cases_share:
            self._cases_share.popitem()[1].close()

    def _shared(self, name: str) -> Slurm | Ray | SglangServer:
        """Return what cases share, which is started for the first of them; only one is there at a time."""
        if name not in self._cases_share:
            self.close()
            group = ControlGroup("pids", f"{self._root.name}-{self._worker}-{name}")
            folder = self._root / f"{name}-{self._worker}"
            shutil.rmtree(folder, ignore_errors=True)
            if name == "sglang":
                self._cases_share[name] = SglangServer(folder, group, self._root / "inputs" / "m")
            else:
                self._cases_share[name] = start(name, folder, group)
        return self._cases_share[name]

    def _server(self) -> SglangServer:
        server = self._shared("sglang")
        assert isinstance(server, SglangServer)
        return server

    def _run(self, case: Case, random: Random) -> Verdict:
        folder = self._root / f"case-{case.number}"
        defects: list[str] = []
        with ExitStack() as stack:
            shared = self._shared(case.cluster) if case.cluster else None
            cluster = shared if isinstance(shared, Slurm | Ray) else None
            if isinstance(case.fault, LyingServer):
                case.fault.server = self._server()
            run = self._new(folder, f"{self._root.name}-{self._worker}-{case.number}", stack, random, cluster)
            if case.fault.nodes == 2:
                run.namespaces = stack.enter_context(hosts(f"{tag_of(self._root)}{self._worker}"))
            stack.callback(case.fault.close, run)
            case.fault.prepare(run)
            right = self.right_weights(case)
            run.start(self._commands(case, run))
            witness = self._inject(run, case)
            outcome, line = self._first_end(run, case, witness, right, defects)
        if not defects and not self._keep:
            shutil.rmtree(folder, ignore_errors=True)
        return Verdict(case.number, case.title, case.fault.kind, outcome, witness, line, 0.0, 1, tuple(defects))

    def right_weights(self, case: Case) -> str:
        """Return the final weights of the undisturbed run of a case's layout and reward."""
        plain: Fault = Fault("")
        key = case.layout
        if isinstance(case.fault, BadService):
            plain, key = BadService(""), f"{key} service"
        elif isinstance(case.fault, LyingServer | LostServer):
            plain, key = LyingServer("", server=self._server()), f"{key} sglang"
        if key not in self._right:
            with ExitStack() as stack:
                name = f"{self._root.name}-{self._worker}-right"
                run = self._new(self._root / f"right-{self._worker}-{key}", name, stack, Random(0))
                undisturbed = Case(0, plain, case.layout, "train", 1, 0.0, 0, False)
                stack.callback(plain.close, run)
                plain.prepare(run)
                run.start(self._commands(undisturbed, run))
                assert run.wait(deadline_s=START_S), f"the undisturbed run of {key} does not end: {run.text()}"
                final = weights(run.folder / "run", STEPS)
                assert final is not None, run.text()
                self._right[key] = final
        return self._right[key]

    def _new(
        self, folder: Path, name: str, stack: ExitStack, random: Random, cluster: Slurm | Ray | None = None
    ) -> Run:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        shutil.copytree(self._root / "inputs", folder, dirs_exist_ok=True)
        group = ControlGroup("pids", name)
        run = ClusterRun(name, folder, group, random, cluster=cluster) if cluster else Run(name, folder, group, random)
        stack.callback(unmount_below, folder)
        stack.callback(run.close)
        return run

    def _commands(self, case: Case, run: Run) -> list[list[str]]:
        settings = [*inputs.settings(case.layout), *case.fault.reward, *case.fault.settings]
        if case.memory:
            settings.append("checkpoint.memory.interval=1")
        ranks = LAYOUTS[case.layout][0]
        program = ["-m", "mega_rl.cli", "train"]
        if case.launcher == "torchrun":
            torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
            torchrun += ["--signals-to-handle=SIGTERM,SIGINT,SIGUSR1"]  # SIGUSR1 would end torchrun alone
            return [[*torchrun, *program, *settings]]
        if isinstance(run, ClusterRun):
            return [[*run.cluster.launch(ranks, case.restarts), *settings]]
        restarts = ["--max-restarts", str(case.restarts)]
        if case.launcher == "train":
            return [[*program, "--nproc-per-node", str(ranks), *restarts, *settings]]
        address, port = (HOSTS[0] if run.namespaces else "127.0.0.1"), 20_000 + 100 * self._worker + case.number % 100
        run.environment[KEY] = "campaign" * 8
        run.environment["GLOO_SOCKET_IFNAME"] = INTERFACE if run.namespaces else "lo"
        nodes = ["--nnodes", "2", "--nproc-per-node", str(ranks // 2), "--master-addr", address]
        nodes += ["--master-port", str(port), *restarts]
        return [[*program, *nodes, "--node-rank", str(node), *settings] for node in range(2)]

    def _inject(self, run: Run, case: Case) -> str:
        if case.step < 0:
            run.wait_for(run.ranks, deadline_s=START_S)
        elif not run.wait_for(lambda: case.step in run.steps(), deadline_s=START_S):
            return ""
        run.wait_for(lambda: False, deadline_s=case.delay_s)
        return case.fault.fire(run)

    def _first_end(self, run: Run, case: Case, witness: str, right: str, defects: list[str]) -> tuple[str, str]:
        """Wait for the run's end and judge it; a run that stopped is started again without the fault."""
        ended = run.wait(deadline_s=case.fault.deadline_s)
        text = run.text()
        codes = [launcher.exit_code for launcher in run.launchers]
        if not ended:
            defects.append(f"hang: exit codes {codes} after {case.fault.deadline_s:g} s")
            for launcher in run.launchers:
                launcher.end()
        if orphans := run.orphans():
            defects.append(f"orphans: {len(orphans)} processes outlive the launcher")
        run.kill_rest()
        if locked(run.folder / "run" / "checkpoints" / ".lock"):
            defects.append("the run folder is locked")
        if "Traceback (most recent call last)" in text and case.launcher != "torchrun":  # which writes one of its own
            defects.append("a traceback")
        line = last_line(run.launchers[0].output.read_text(errors="replace"))
        if ended and not any(codes):
            defects += _differs(run, right)
            again = re.search(r"restart \d+ of", text) or any(launcher.restarts for launcher in run.launchers)
            return (RESTARTED if again else CONTINUED) if witness else NOT_FIRED, line
        if witness:
            defects += _cause_problems(case, codes, text)
        case.fault.heal(run)
        run.start(self._commands(case, run))
        if not run.wait(deadline_s=START_S) or any(launcher.exit_code for launcher in run.launchers):
            again = [launcher.exit_code for launcher in run.launchers]
            defects.append(f"started again it ends with {again}: {last_line(run.text())}")
        else:
            defects += _differs(run, right)
        return STOPPED if witness else NOT_FIRED, line


def _cause_problems(case: Case, codes: Sequence[int | None], text: str) -> list[str]:
    """Return what is wrong with how a run that stopped says so."""
    signals = {130, 137, 138, 143, -9}
    if not case.fault.names_cause:
        return [] if set(codes) <= signals | {0, 1, 2} else [f"exit codes {codes}"]
    errors = [line for line in text.splitlines() if re.match(r"(\[node \d+\] )?error:", line)]
    if not errors:
        return ["no line says why it stopped"]
    if not any(cause in line for cause in case.fault.causes for line in errors):
        return [f"the cause is not named: {errors[-1][:300]}"]
    return []


def _differs(run: Run, right: str) -> list[str]:
    final = weights(run.folder / "run", STEPS)
    return [] if final == right else [f"wrong result: weights {final} instead of {right}"]


def tag_of(root: Path) -> str:
    """Return what the names of a campaign's network namespaces have in common."""
    return root.name.rpartition("-")[2]


def locked(path: Path) -> bool:
    """Return whether a process holds a lock file."""
    deadline = time.monotonic() + RELEASE_S
    while path.exists() and time.monotonic() < deadline:
        try:
            os.close(lock_file(path))
        except BlockingIOError:
            time.sleep(0.05)
        except OSError:
            return False
        else:
            return False
    return path.exists()
