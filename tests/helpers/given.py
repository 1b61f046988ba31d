"""Rows with given answers, tiny checkpoints for them, and their training on ranks."""

from __future__ import annotations

import json
import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

STEPS, BATCH, LR, EPS = 20, 4, 3e-4, 1e-3  # a large epsilon: Adam divides rounding errors of small gradients by it
VOCABULARY = ("<pad>", "<eos>", "<unk>", *"abcdefghij =+;:?!")
SETTINGS: dict[str, object] = {
    "model.dtype": "fp32", "data.shuffle": False, "data.max_prompt_tokens": 40,
    "optim.lr": LR, "optim.eps": EPS, "optim.clip_grad": 0.0, "trainer.steps": STEPS,
    "trainer.prompts_per_step": BATCH, "trainer.minibatch_size": BATCH, "trainer.microbatch.max_tokens": 96,
    "trainer.timeout_s": 120, "trainer.device": "cpu", "checkpoint.save_final": False, "checkpoint.resume": "never",
    "metrics.tensorboard": False,
}  # fmt: skip
ANSWER_OF_IPO = 4  # tokens of each answer of `ipo`, with the end
KIND_SETTINGS: dict[str, dict[str, object]] = {"ipo": {"algorithm.kind.beta": 1.0}}
LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "1": (1, {}),
    "tp2": (2, {"engine.megatron.tp": 2}),
    "pp2": (2, {"engine.megatron.pp": 2}),
    "dp2": (2, {}),
    "cp2": (2, {"engine.megatron.cp": 2}),
    "fsdp1": (1, {"engine.backend": "fsdp"}),
    "fsdp2": (2, {"engine.backend": "fsdp"}),
}


def write_inputs(folder: Path) -> None:
    """Write a checkpoint and rows of each kind; a reward model has a head, with numbers."""
    from transformers import Qwen3ForSequenceClassification

    from mega_rl.cli.quickstart.inputs import TaskTokens, write_fresh_model

    numbers = random.Random(0)

    def text(least: int, most: int) -> str:
        return "".join(numbers.choices("abcdefghij", k=numbers.randint(least, most)))

    def equal() -> str:
        return text(ANSWER_OF_IPO - 1, ANSWER_OF_IPO - 1)

    prompts = [text(2, 9) + "=" for _ in range(STEPS * BATCH)]
    pairs = [{"prompt": one, "chosen": text(1, 9), "rejected": text(1, 12)} for one in prompts]
    rows: dict[str, list[dict[str, Any]]] = {
        "sft": [{"prompt": one, "completion": text(1, 9)} for one in prompts],
        **dict.fromkeys(("dpo", "simpo", "orpo"), pairs),
        "rm": [{**one, "margin": number % 3 / 4} for number, one in enumerate(pairs)],
        "kto": [{"prompt": one, "completion": text(1, 9), "label": bool(i % 3)} for i, one in enumerate(prompts)],
        "ipo": [{"prompt": one, "chosen": equal(), "rejected": equal()} for one in prompts],
    }
    for kind, own in rows.items():
        (folder / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
        write_fresh_model(folder / kind, TaskTokens(VOCABULARY, r"[\s\S]", 64), seed=3)
    torch.manual_seed(5)
    scorer = Qwen3ForSequenceClassification.from_pretrained(folder / "rm", num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(scorer.score.weight, std=0.1)
    scorer.save_pretrained(folder / "rm")


def train_given(folder: str, kind: str, layout: str, **settings: object) -> dict[str, Any]:
    """Train on this rank; return losses, first and last gradients, weights, as `tests.peers.trl_training` does."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("cpu")
    from mega_rl.config.loader import load
    from mega_rl.trainer.assemble import build_trainer, session
    from tests.helpers.engines import exported, exported_gradients

    of_layout, of_kind = LAYOUTS[layout][1], KIND_SETTINGS.get(kind, {})
    inputs = {"model.path": f"{folder}/{kind}", "data.train_files": [f"{folder}/{kind}.jsonl"], "algorithm.kind": kind}
    run_dir = f"{folder}/runs/{kind}-{layout}-{len(settings)}"
    megatron = of_layout.get("engine.backend") != "fsdp"
    whole = {"engine.megatron.optimizer.distributed": False} if megatron else {}
    config = load(None, {**SETTINGS, **inputs, "trainer.run_dir": run_dir, **of_layout, **whole, **of_kind, **settings})
    answer: dict[str, Any] = {"losses": [], "gradients": []}
    with session(config, accelerator) as groups, ExitStack() as resources:
        trainer = build_trainer(config, accelerator, groups, stop_requested=lambda: False, resources=resources)
        engine = trainer.algorithm.actor.engine  # type: ignore[attr-defined]
        for step in range(trainer.start, config.trainer.steps):
            trainer.log.begin()
            trainer.step(step)
            metrics = trainer.log.metrics
            answer["losses"].append(metrics.get("sft/loss", metrics.get("preference/loss")))
            if megatron and step in (0, config.trainer.steps - 1):
                answer["gradients"].append(exported_gradients(engine))
        answer |= {"weights": exported(engine), "metrics": dict(metrics)}
    return answer
