"""Base model to policy on two cores: sft, reward model, PPO with it, DPO, distillation; right answers after each.

    python scripts/post_training.py runs/post_training

Data and model are the quickstart's sums. Of the demonstrations 30 % are right. The model of sft then answers each sum
eight times; a pair is a right and a wrong answer of its own to a sum. The reward model learns from the pairs and is the
only reward of PPO, whose distance to the model of sft costs; DPO learns from the same pairs. Distillation trains the
model of sft on right answers of PPO's. A held-out sum is in no demonstration and no pair. `--size 0.1` runs a tenth of
the steps.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from mega_rl.algorithms.evaluation import mean_with_interval
from mega_rl.cli.quickstart import sums
from mega_rl.cli.quickstart.inputs import write_fresh_model, write_rows

RANKS = "--nproc-per-node=2"
HELD_OUT = 1000
SAVES = ["checkpoint.save_final=false", "checkpoint.hf_final=true", "trainer.timeout_s=120"]
GIVEN = [
    *("model.dtype=fp32", "data.max_prompt_tokens=12", "checkpoint.resume=never", "engine.megatron.tp=2"),
    *("trainer.prompts_per_step=256", "trainer.minibatch_size=256", "optim.schedule=cosine"),
]


def main(folder: Path, size: float) -> None:
    """Run every stage in a new folder, and print the table of docs/given_answers.md."""
    sums.write_data(folder / "data", seed=0, num_held_out=HELD_OUT)
    write_fresh_model(folder / "base", sums.TOKENS, seed=0)
    started, rows = time.perf_counter(), [("base", share(folder, folder / "base"), 0.0)]

    def stage(name: str, command: str, model: Path, *settings: str, steps: int) -> Path:
        begun, steps = time.perf_counter(), max(1, int(steps * size))
        own = [f"model.path={model}", f"trainer.run_dir={folder / name}", f"trainer.steps={steps}", *SAVES]
        given = [] if command == "train" else [*GIVEN, f"optim.warmup_steps={steps // 10}"]
        run(command, *given, *own, *settings, RANKS)
        taken, written = time.perf_counter() - begun, folder / name / "hf" / f"step_{steps:06d}"
        rows.append((name, "" if name == "rm" else share(folder, written), taken))
        return written

    of_pairs = f"data.train_files=[{folder}/data/pairs.jsonl]"
    demonstrations = [f"data.train_files=[{folder}/data/demonstrations.jsonl]", "data.answer_key=response"]
    sft = stage("sft", "sft", folder / "base", *demonstrations, "optim.lr=3e-3", steps=400)
    write_rows(folder / "data" / "pairs.jsonl", pairs(folder, sft))
    rm = stage("rm", "rm", sft, of_pairs, "optim.lr=2e-3", steps=200)
    prompts = [f"data.train_files=[{folder}/data/train.jsonl]", f"data.val_files=[{folder}/data/held_out.jsonl]"]
    scorer = [f"reward.source={{name: model, path: {rm}}}", "algorithm.kl.coef=0.1"]
    ppo = stage("ppo", "train", sft, "--config=quickstart", *prompts, *scorer, steps=40)
    near = ["algorithm.kind.beta=0.3", "algorithm.kind.reference=once"]
    stage("dpo", "dpo", sft, of_pairs, "optim.lr=1e-3", *near, steps=100)
    evaluate(folder, ppo, "train", "validation.n=2", "validation.temperature=1")
    teacher = [f"--samples={folder}/eval/ppo_train/samples.jsonl", "--right", "optim.lr=1e-3"]
    stage("distill", "distill", sft, *teacher, steps=100)
    print(f"| stage | {HELD_OUT} held-out sums that are right | seconds |\n|---|---|---|")
    for name, right, seconds in rows:
        print(f"| {name} | {right} | {seconds:.0f} |")
    print(f"\n{time.perf_counter() - started:.0f} s with sampling and all evaluations")


def pairs(folder: Path, model: Path) -> list[dict[str, str]]:
    """Return pairs of the model's own answers to training sums: the right one, and each of the wrong ones."""
    many = ["validation.n=8", "validation.temperature=2", "rollout.hf.batch_size=2048"]
    answers = defaultdict(set)
    for sample in evaluate(folder, model, "train", *many):
        answers[sample["prompt"], sample["reference"]].add(sample["response"])
    rows = [
        {"prompt": prompt, "chosen": right, "rejected": one}
        for (prompt, right), given in answers.items()
        if right in given
        for one in sorted(given - {right, ""})
    ]
    random.Random(0).shuffle(rows)
    return rows


def share(folder: Path, model: Path) -> str:
    """Return the share of held-out sums that a model answers right, greedily, with its 95 % interval."""
    right = [sample["reward"] for sample in evaluate(folder, model, "held_out")]
    one = mean_with_interval(right, samples=1)
    return f"{one.mean:.1%} ({one.low:.1%} to {one.high:.1%})"


def evaluate(folder: Path, model: Path, rows: str, *settings: str) -> list[dict[str, Any]]:
    """Return a model's answers to a file of sums, with rewards."""
    out = folder / "eval" / f"{model.parent.parent.name}_{rows}"
    files = [f"--out={out}", f"model.path={model}", f"data.val_files=[{folder}/data/{rows}.jsonl]"]
    sizes = ["model.dtype=fp32", "data.max_prompt_tokens=6", "rollout.max_new_tokens=4"]
    run("eval", *files, *sizes, "reward.function=exact_match", *settings)
    return [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]


def run(command: str, *arguments: str) -> None:
    """Run a command of mega-rl; its output is shown."""
    subprocess.run([sys.executable, "-m", "mega_rl.cli", command, *arguments], check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="New folder of everything that is written.")
    parser.add_argument("--size", type=float, default=1.0, help="Share of the steps that are run.")
    options = parser.parse_args()
    main(options.folder, options.size)
