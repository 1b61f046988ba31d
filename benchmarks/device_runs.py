"""Parts of device.py that start other programs: the tests marked for a GPU, the whole suite, and a run of GRPO."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

from device_micro import GPU, Record

PROJECT = Path(__file__).parents[1]
TESTS = PROJECT / "tests" / "unit_tests"
SMALL = TESTS / "test_untrusted.py"  # in seconds, without torch
SHOWN_FAILURES = 20
# Metrics of a step that hardly depend on which tokens a sampler drew.
COMPARED = ("actor/grad_norm", "actor/entropy")


def tests(*, tiny: bool) -> Iterator[Record]:
    """Run the tests that need a GPU, which machines without one skip."""
    marks = "gpu or not gpu" if tiny else "gpu"
    # One GPU for all of them: one after the other.
    yield {"case": "marked gpu", **_pytest(["-m", marks, "--timeout=120"], [SMALL if tiny else TESTS])}


def suite(*, tiny: bool) -> Iterator[Record]:
    """Run all unit tests where a GPU is visible: those that start several ranks stay on the CPU, the rest may not."""
    if tiny:
        yield {"case": "unit tests", **_pytest([], [SMALL])}
        return
    workers = max(1, min(14, (os.cpu_count() or 2) - 2))
    options = ["-n", str(workers), "--dist", "loadfile", "--timeout=200"]
    yield {"case": f"unit tests, {workers} at a time", **_pytest(options, [TESTS])}


def run(*, tiny: bool) -> Iterator[Record]:
    """Train the quickstart's fresh model by GRPO on one rank, by both engines, on the CPU and the device.

    The first step of each is compared with that of Megatron-Core on the CPU.

    Samplers of both devices draw alike where their logits, in FP32, round alike.
    """
    from mega_rl.cli.quickstart import sums
    from mega_rl.cli.quickstart.inputs import write_fresh_model

    with tempfile.TemporaryDirectory(prefix="mega_rl_device_") as name:
        folder = Path(name)
        sums.write_data(folder / "data", seed=0)
        write_fresh_model(folder / "model", sums.TOKENS, seed=0)
        cases = [
            (backend, device) for device in ("cpu", *(["cuda"] if GPU else [])) for backend in ("megatron", "fsdp")
        ]
        steps = {case: _train(folder, *case, steps=1 if tiny else 5) for case in cases}
    for (backend, device), metrics in steps.items():
        seconds = [step["time/step_s"] for step in metrics]
        record: Record = {"case": f"GRPO on {backend}, {device}", "steps": len(seconds), "step_s": min(seconds)}
        for key in COMPARED:
            ours, theirs = metrics[0][key], steps["megatron", "cpu"][0][key]
            record[f"{key.rsplit('/', 1)[-1]}_difference"] = abs(ours - theirs) / abs(theirs)
        yield record


def _train(folder: Path, backend: str, device: str, *, steps: int) -> list[dict[str, float]]:
    """Return the metrics of each step of a run in a process of its own."""
    from mega_rl.tracking.metrics.records import read_metrics

    settings = {
        "trainer.run_dir": str(folder / backend / device),
        "trainer.device": device,
        "trainer.steps": steps,
        "trainer.val_interval": 0,
        "trainer.prompts_per_step": 8 if steps == 1 else 128,
        "trainer.minibatch_size": 8 if steps == 1 else 64,
        **({"engine.megatron.tp": 1} if backend == "megatron" else {"engine.backend": backend}),
        "algorithm.advantage": "grpo",
        "algorithm.kl": "loss",
        "algorithm.kl.estimator": "k3",
        "algorithm.entropy_coef": 0.01,  # a fresh model earns no reward, and has no gradient without it
        "model.path": str(folder / "model"),
        "data.train_files": [str(folder / "data" / "train.jsonl")],
        "data.val_files": [],
        "reward.function": f"{folder / 'data' / 'reward.py'}:points",
    }
    arguments = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    command = [sys.executable, "-W", "ignore", "-m", "mega_rl.cli", "train", "--config", "quickstart", *arguments]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}  # a run on the CPU is refused where GPUs are seen
    environment = _environment() | hidden
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"training by {backend} on {device} ended with {done.returncode}: {done.stderr[-2000:]}")
    records = read_metrics(folder / backend / device / "metrics.jsonl")
    return [dict(record.metrics) for record in records if "time/step_s" in record.metrics]


def _pytest(options: list[str], paths: list[Path]) -> Record:
    """Return how many tests passed, failed and were skipped, in how many seconds; names of the first that failed."""
    with tempfile.TemporaryDirectory(prefix="mega_rl_device_") as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
        done = subprocess.run(
            [*command, f"--junitxml={report}", *map(str, paths)],
            cwd=PROJECT,
            env=_environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode not in (0, 1):
            raise RuntimeError(f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
        (result,) = ElementTree.parse(report).getroot().iter("testsuite")
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in result.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped, total = int(result.get("skipped", 0)), int(result.get("tests", 0))
    return {
        "passed": total - skipped - len(failed),
        "failed": len(failed),
        "skipped": skipped,
        "seconds": float(result.get("time", 0.0)),
        "names": " ".join(failed[:SHOWN_FAILURES]),
    }


def _environment() -> dict[str, str]:
    """Return this process's environment without a launcher's variables."""
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in ranks and "TORCHELASTIC" not in name}
