"""Base model to policy on two cores: sft, reward model, PPO with it, DPO; share of right answers after each.

    python scripts/post_training.py runs/post_training

Data and model are the quickstart's sums. Of the demonstrations 30 % are right. Pairs have the right sum and a wrong
one, without its carry or any other; the reward model learns from them and is the only reward of PPO. DPO learns from
the same pairs. A held-out sum is in no demonstration and no pair.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

from mega_rl.cli.quickstart import sums
from mega_rl.cli.quickstart.inputs import write_rows

RANKS = "--nproc-per-node=2"
COMMON = [
    *("model.dtype=fp32", "data.max_prompt_tokens=12", "trainer.timeout_s=120", "checkpoint.resume=never"),
    *("checkpoint.save_final=false", "checkpoint.hf_final=true", "engine.megatron.tp=2"),
]


def main(folder: Path) -> None:
    """Run every stage in a new folder, and print the table of docs/given_answers.md."""
    sums.write_data(folder / "data", seed=0)
    sums.write_model(folder / "base", seed=0)
    write_rows(folder / "data" / "pairs.jsonl", pairs(folder / "data" / "train.jsonl"))
    started, rows = time.perf_counter(), [("base", share(folder, folder / "base"), 0.0)]

    def stage(name: str, command: str, model: Path, *settings: str, steps: int) -> Path:
        begun = time.perf_counter()
        own = [f"model.path={model}", f"trainer.run_dir={folder / name}", f"trainer.steps={steps}"]
        run(command, *(() if command == "train" else COMMON), *own, *settings, RANKS)
        written = folder / name / "hf" / f"step_{steps:06d}"
        if name != "rm":
            rows.append((name, share(folder, written), time.perf_counter() - begun))
        return written

    batch = ["trainer.prompts_per_step=256", "trainer.minibatch_size=256"]
    of_pairs = [f"data.train_files=[{folder}/data/pairs.jsonl]", *batch]
    demonstrations = [f"data.train_files=[{folder}/data/demonstrations.jsonl]", "data.answer_key=response"]
    decay = ["optim.schedule=cosine", "optim.lr=3e-3", "optim.warmup_steps=40"]
    sft = stage("sft", "sft", folder / "base", *demonstrations, *batch, *decay, steps=400)
    rm = stage("rm", "rm", sft, *of_pairs, "optim.lr=1e-3", steps=150)
    scorer = f"reward.source={{name: model, path: {rm}}}"
    files = [f"data.train_files=[{folder}/data/train.jsonl]", f"data.val_files=[{folder}/data/held_out.jsonl]"]
    saves = ["checkpoint.save_final=false", "checkpoint.hf_final=true"]
    stage("ppo", "train", sft, "--config=quickstart", *files, *saves, scorer, steps=60)
    stage("dpo", "dpo", sft, *of_pairs, "optim.lr=3e-4", "algorithm.kind.reference=once", steps=100)
    print("| model | held-out sums that are right | seconds |\n|---|---|---|")
    for name, right, seconds in rows:
        print(f"| {name} | {right:.1%} | {seconds:.0f} |")
    print(f"\n{time.perf_counter() - started:.0f} s with the reward model and all evaluations")


def pairs(train: Path) -> list[dict[str, str]]:
    """Return pairs for each sum: the right answer, and one of each way to be wrong."""
    numbers, rows = random.Random(0), []
    for line in train.read_text().splitlines():
        row = json.loads(line)
        left, right = (int(part) for part in row["prompt"].rstrip("=").split("+"))
        near = [
            sums.add(left, right + shift)
            for shift in numbers.sample((-11, -10, -9, -1, 1, 9, 10, 11), 2)
            if right + shift >= 0
        ]
        length = "".join(numbers.choices("0123456789=+-", k=numbers.choice((0, 1, 2, 4))))
        anything = "".join(numbers.choices("0123456789", k=3))
        wrong = {sums.add_without_carry(left, right), *near, anything, length, row["answer"][:2]} - {row["answer"], ""}
        rows += [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": one} for one in sorted(wrong)]
    numbers.shuffle(rows)
    return rows


def share(folder: Path, model: Path) -> float:
    """Return the share of held-out sums that a model answers right, greedily."""
    out = folder / "eval" / f"{model.parent.parent.name}_{model.name}"
    held_out = f"data.val_files=[{folder}/data/held_out.jsonl]"
    settings = [
        "model.dtype=fp32",
        "data.max_prompt_tokens=6",
        "rollout.max_new_tokens=4",
        "reward.function=exact_match",
    ]
    run("eval", f"--out={out}", f"model.path={model}", held_out, *settings)
    return float(json.loads((out / "results.json").read_text())["sets"][""]["means"]["reward_mean"])


def run(command: str, *arguments: str) -> None:
    """Run a command of mega-rl; its output is shown."""
    subprocess.run([sys.executable, "-m", "mega_rl.cli", command, *arguments], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
