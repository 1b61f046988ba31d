"""Train with TRL's trainers of given answers: `python -m tests.peers.trl_training FOLDER KIND...`.

FOLDER has a checkpoint and rows for each kind (tests/helpers/given.py); KIND.pt gets the losses of all steps, the
gradients of the first and of the last, and the weights after it. Three definitions differ from ours, which follow
the papers: TRL's IPO divides sums of log-probs by tokens, so answers have one length here. Its ORPO adds the prompt's
likelihood and averages over a batch's tokens; that term is ours here, the odds ratio TRL's. Its KTO gives a prompt the
answer before it in the batch, ours the answer behind it, so rows of a batch come in reverse.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from tests.helpers.given import ANSWER_OF_IPO, BATCH, EPS, LR, STEPS


class AnswersOnly(ORPOTrainer):  # type: ignore[misc]
    def concatenated_forward(self, *args: Any) -> tuple[torch.Tensor, ...]:
        chosen, *others, _ = super().concatenated_forward(*args)
        return chosen, *others, -chosen.mean()


class Sums(trl.DPOTrainer):  # type: ignore[misc]
    def compute_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().compute_loss(*args, **kwargs)
        return loss * ANSWER_OF_IPO**2


TRAINERS: dict[str, Any] = {
    "sft": (trl.SFTTrainer, trl.SFTConfig, AutoModelForCausalLM, {}),
    "dpo": (trl.DPOTrainer, trl.DPOConfig, AutoModelForCausalLM, {"beta": 0.1}),
    "ipo": (Sums, trl.DPOConfig, AutoModelForCausalLM, {"loss_type": "ipo", "beta": ANSWER_OF_IPO}),
    "simpo": (
        CPOTrainer,
        CPOConfig,
        AutoModelForCausalLM,
        {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.0},
    ),
    "orpo": (AnswersOnly, ORPOConfig, AutoModelForCausalLM, {"beta": 0.1}),
    "kto": (trl.KTOTrainer, trl.KTOConfig, AutoModelForCausalLM, {"beta": 0.1}),
    "rm": (trl.RewardTrainer, trl.RewardConfig, AutoModelForSequenceClassification, {}),
}


def train(folder: Path, kind: str) -> dict[str, Any]:
    """Return what 20 steps gave; rows come in their order."""
    trainer_class, config_class, model_class, settings = TRAINERS[kind]
    answer: dict[str, Any] = {"losses": [], "gradients": []}

    class Recorded(trainer_class):  # type: ignore[misc, valid-type]
        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss: torch.Tensor = super().training_step(*args, **kwargs)
            answer["losses"].append(float(loss))
            answer["gradients"].append({name: p.grad.clone() for name, p in self.model.named_parameters()})
            return loss

    config = config_class(
        output_dir=str(folder / "trl"), max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=LR,
        lr_scheduler_type="constant", adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=EPS, weight_decay=0.0,
        max_grad_norm=0.0, bf16=False, use_cpu=True, gradient_checkpointing=False, report_to=[], save_strategy="no",
        disable_tqdm=True, max_length=None, optim="adamw_torch", **settings,
    )  # fmt: skip
    extra = {"num_labels": 1} if kind == "rm" else {}
    model = model_class.from_pretrained(folder / kind, dtype=torch.float32, attn_implementation="sdpa", **extra)
    rows = [json.loads(line) for line in (folder / f"{kind}.jsonl").read_text().splitlines()]
    if kind == "kto":
        rows = [row for begin in range(0, len(rows), BATCH) for row in reversed(rows[begin : begin + BATCH])]
    trainer = Recorded(
        model=model, args=config, train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder / kind),
    )  # fmt: skip
    trainer.train()
    answer["gradients"] = [answer["gradients"][0], answer["gradients"][-1]]
    return {**answer, "weights": {name: p.detach().clone() for name, p in trainer.model.named_parameters()}}


if __name__ == "__main__":
    for one in sys.argv[2:]:
        torch.save(train(Path(sys.argv[1]), one), Path(sys.argv[1]) / f"{one}.pt")
