"""A short supervised warm start with the engine that the training will use."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from mega_rl.algorithms.losses import AGGREGATIONS, loss_weights, nll_loss
from mega_rl.algorithms.statistics import Sequences
from mega_rl.config.schema import Config
from mega_rl.data.order import permutation
from mega_rl.parallel.accelerator import Accelerator
from mega_rl.parallel.comm import share
from mega_rl.protocols import LossOutput
from mega_rl.tracking import progress
from mega_rl.trainer.assemble import build_actor, session
from mega_rl.types import Experience, TokenOutputs, response_mask

log = logging.getLogger(__name__)

LOG_INTERVAL = 100  # steps

Demonstration = tuple[Sequence[int], Sequence[int]]  # token ids of prompt and response, the stop token included


@dataclass(frozen=True)
class SupervisedLoss:
    """The mean negative log-likelihood of the response tokens."""

    needs_entropy: ClassVar[bool] = False

    def __call__(self, outputs: TokenOutputs, fields: Mapping[str, Tensor], sequences: Sequences) -> LossOutput:
        assert outputs.logprobs is not None
        return nll_loss(outputs.logprobs, loss_weights=fields["loss_weights"])


def warm_start(
    config: Config,
    accelerator: Accelerator,
    demonstrations: Sequence[Demonstration],
    *,
    output: Path,
    steps: int,
    batch_size: int,
    lr: float,
) -> None:
    """Fit `config.model.path` to the demonstrations and write the result as a Hugging Face checkpoint; collective.

    The learning rate rises linearly to `lr` over a tenth of the steps, times a cosine that falls from 1 to 0.1.
    """
    with session(config, accelerator) as groups:
        engine = build_actor(config, groups, accelerator)
        order = permutation(len(demonstrations), key=(config.trainer.seed,))
        with progress.rounds("warm start step", steps) as rounds:
            for step in range(steps):
                chosen = [order[(step * batch_size + i) % len(order)] for i in range(batch_size)]
                batch = supervised_batch([demonstrations[i] for i in chosen])
                own = share(batch_size, engine.data_parallel)  # this data-parallel rank's rows
                factor = min(1.0, (step + 1) / max(1, steps // 10)) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
                metrics = engine.train_minibatch(batch[own.start : own.stop], SupervisedLoss(), lr=lr * factor)  # type: ignore[index]
                rounds.advance()
                level = logging.DEBUG if step % LOG_INTERVAL and step + 1 < steps else logging.INFO
                log.log(level, "warm start %d/%d: loss %.3f", step + 1, steps, metrics["sft/loss"])
        with progress.phase(f"saving {output}"):
            engine.save_hf(output, source=Path(config.model.path))


def supervised_batch(demonstrations: Sequence[Demonstration]) -> Experience:
    """Return the demonstrations as a batch whose loss weights give the token mean."""
    rows = len(demonstrations)
    prompt_lengths = torch.tensor([len(prompt) for prompt, _ in demonstrations])
    lengths = torch.tensor([len(prompt) + len(response) for prompt, response in demonstrations])
    tokens = torch.zeros(rows, int(lengths.max()), dtype=torch.int64)
    for row, (prompt, response) in enumerate(demonstrations):
        tokens[row, : len(prompt) + len(response)] = torch.tensor([*prompt, *response])
    mask = response_mask(prompt_lengths, lengths, width=tokens.size(1))
    weights = loss_weights(
        mask,
        AGGREGATIONS["token-mean"],
        global_tokens=float(mask.sum()),
        global_sequences=float(rows),
        max_response_tokens=tokens.size(1),
    )
    return Experience.from_rows(
        tokens, prompt_lengths=prompt_lengths, lengths=lengths, loss_weights=weights, token_weights=weights
    )
