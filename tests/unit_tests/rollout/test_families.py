"""The embedded rollout engine takes every family's weights by their names on disk and samples from the right model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mega_rl.converters.families import FAMILIES
from mega_rl.converters.safetensors.reader import CheckpointReader
from mega_rl.rollout.embedded import HFRolloutEngine
from mega_rl.rollout.sampling import Sampler
from mega_rl.types import Prompt
from tests.helpers.models import hf_logits, write_tiny_checkpoint

pytestmark = pytest.mark.slow

LENGTHS = (3, 11, 6)


def engine_of(path: Path) -> HFRolloutEngine:
    return HFRolloutEngine(
        path,
        dtype=torch.float32,
        device="cpu",
        sampler=Sampler(temperature=1.0),
        max_new_tokens=12,  # beyond the windows of the tiny models
        stop_token_ids=[],
        batch_size=4,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_rollouts_have_the_log_probs_of_transformers(tmp_path: Path, family: str) -> None:
    """Weights as the trainer sends them, in buckets; log-probs of the samples against an eager forward (1e-4)."""
    path = write_tiny_checkpoint(tmp_path / "model", family=family, tied=False)
    engine = engine_of(path)
    with CheckpointReader(path) as reader:
        weights = [(name, reader.read(name)) for name in reader.tensors]
    for start in range(0, len(weights), 7):
        engine.load_weights(weights[start : start + 7])
    engine.finish_update(1)
    sums = engine.checksums([name for name, _ in weights])
    assert len(set(sums)) == len(weights)
    generator = torch.Generator().manual_seed(3)
    prompts = [
        Prompt(i, tuple(torch.randint(2, 50, (length,), generator=generator).tolist()), "", "")
        for i, length in enumerate(LENGTHS)
    ]
    rollout = engine.generate(prompts, [0, 1, 2], n=2, seed=(5,))
    for row in range(len(LENGTHS) * 2):
        length = int(rollout.lengths[row])
        tokens = rollout.tokens[row : row + 1, :length]
        expected = hf_logits(path, tokens).log_softmax(-1)[0, :-1].gather(1, tokens[0, 1:, None])[:, 0]
        mask = rollout.loss_mask[row, 1:length]
        off = (rollout.rollout_logprobs[row, 1:length] - expected)[mask].abs().max()
        assert float(off) <= 1e-4
