"""A run whose every answer is a hostile program: how many of its steps are lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mega_rl.tracking.metrics.records import read_metrics
from tests.helpers.models import write_digit_tokenizer, write_tiny_checkpoint
from tests.hostile_programs.campaign import canaries
from tests.hostile_programs.programs import Hostile

TESTS = {
    "plain": {"inputs": ["5"], "outputs": ["no program prints this"]},
    "asserts": ["assert f(1) == 4 and f(12345) == 37036"],
    "call": {"fn_name": "f", "inputs": [[12345]], "outputs": [37036]},
    "stdin": {"inputs": ["12345"], "outputs": ["37036"]},
}
SAMPLES = 2


@dataclass(frozen=True)
class Training:
    """End of one run."""

    exit_code: int
    log: str  # the last of it
    expected_steps: int
    steps: int
    passed: float  # mean share of tests passed; 0 where no verdict was forged
    failures: dict[str, float]  # responses without a score, by metric
    reached: tuple[str, ...]  # canaries

    @property
    def as_it_should(self) -> bool:
        """Return whether no step is lost, no verdict forged and no canary reached."""
        return not (self.exit_code or self.passed or self.reached) and self.steps == self.expected_steps

    def __str__(self) -> str:
        failures = ", ".join(f"{name} {count:g}" for name, count in self.failures.items())
        lost = self.expected_steps - self.steps
        return (
            f"{self.steps} of {self.expected_steps} steps, {lost} lost; share of tests passed "
            f"{self.passed:g}; {failures}; canaries reached: {len(self.reached)}; exit code {self.exit_code}"
        )


def train(folder: Path, programs: Sequence[Hostile], *, prompts: int) -> Training:
    """Train a tiny model on one rank with two workers, a row of the data for each program, once over all of them."""
    programs = [*programs, *programs[: -len(programs) % prompts]]
    write_tiny_checkpoint(folder / "actor", num_hidden_layers=1)
    write_digit_tokenizer(folder / "actor", vocab_size=50)
    with canaries() as own:
        rows = [
            {"prompt": f"{number % 10}+2=", "tests": json.dumps(TESTS[one.kind]), "program": own.fill(one.text)}
            for number, one in enumerate(programs)
        ]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        steps = len(programs) // prompts
        settings = (
            *(f"model.path={folder / 'actor'}", "model.dtype=fp32", "optim.lr=1e-3", "algorithm.advantage=grpo"),
            *(f"data.train_files=[{folder / 'train.jsonl'}]", "data.max_prompt_tokens=8", "data.shuffle=false"),
            *("data.answer_key=tests", "rollout.max_new_tokens=6", f"rollout.n={SAMPLES}", "metrics.tensorboard=false"),
            *(f"trainer.steps={steps}", f"trainer.prompts_per_step={prompts}", f"trainer.minibatch_size={prompts}"),
            *("trainer.microbatch.max_tokens=64", "trainer.timeout_s=120", "trainer.device=cpu"),
            *(
                f"trainer.run_dir={folder / 'run'}",
                f"reward.function={Path(__file__).with_name('rewards.py')}:of_the_row",
            ),
            "reward.source.workers=2",
        )
        with (folder / "log").open("wb") as log:
            command = [sys.executable, "-m", "mega_rl.cli", "train", *settings]
            ran = subprocess.run(
                command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
            )
        reached = tuple(own.reached())
    records = (
        list(read_metrics(folder / "run" / "metrics.jsonl")) if (folder / "run" / "metrics.jsonl").exists() else []
    )
    rewards = [record.metrics for record in records if "reward/passed" in record.metrics]
    return Training(
        exit_code=ran.returncode,
        log=(folder / "log").read_text(errors="replace")[-3000:],
        expected_steps=steps,
        steps=len(rewards),
        passed=sum(metrics["reward/passed"] for metrics in rewards) / max(1, len(rewards)),
        failures={name: sum(one[f"reward/{name}"] for one in rewards) for name in ("timeouts", "crashes", "errors")},
        reached=reached,
    )
