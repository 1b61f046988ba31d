"""Checkpoints of fully sharded models: step, save, step, note the logits; load; the same step gives the same logits.

What is loaded equals what was saved to the bit, piece by piece on every rank, and so do the log-probs and entropies
that every token's logits give after the step is repeated: by the engine that went on, and by a fresh one.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mega_rl.config.schema import Config, MicrobatchConfig, TrainerConfig
from mega_rl.config.schema.engine import FsdpConfig, TorchFsdpConfig
from mega_rl.parallel.agreement import broadcast_json
from mega_rl.types import Experience
from tests.helpers.engines import load_state, make_config, own_rows, running_engine, save_state
from tests.helpers.models import random_experience, write_tiny_checkpoint
from tests.helpers.selection import FULL
from tests.special_distributed.program import device, finish, pass_on_four_ranks, world

KINDS = {"weights", "exp_avg", "exp_avg_sq", "numbers"}


def cases(model: Path) -> dict[str, Config]:
    """Ways to shard a model over four ranks."""
    trainer = TrainerConfig(timeout_s=60.0, microbatch=MicrobatchConfig(max_tokens=64), deterministic=True)
    config = partial(make_config, model, trainer=trainer)
    return {
        "Megatron-Core's model in FSDP2, bf16": config(dtype="bf16", ddp=TorchFsdpConfig()),
        "transformers' model in FSDP2": config(engine="fsdp"),
        "transformers' model in two copies, bf16": config(dtype="bf16", engine="fsdp", fsdp=FsdpConfig(shard_ranks=2)),
    }


def a_step_after_loading_is_the_step_after_saving(config: Config, folder: Path) -> None:
    batch = random_experience()
    with running_engine(config) as engine:
        rows = own_rows(batch, engine)
        step(engine, rows)  # so that moments are not zero
        save_state(engine, folder)
        saved = pieces(engine)
        assert kinds(saved) == KINDS, kinds(saved)
        expected = step(engine, rows)
        after = pieces(engine)
        assert kinds(different(after, saved)) == KINDS, "a step changes everything"
        load_state(engine, folder)
        same(pieces(engine), saved)
        same(step(engine, rows), expected)
        same(pieces(engine), after)
    with running_engine(config) as engine:
        assert kinds(different(pieces(engine), saved)) == KINDS, "a fresh engine has all of it otherwise"
        load_state(engine, folder)
        same(pieces(engine), saved)
        same(step(engine, rows), expected)
        same(pieces(engine), after)


def step(engine: Any, rows: Experience) -> dict[str, Tensor]:
    """An optimizer step; its metrics, and what the logits after it give."""
    from tests.unit_tests.distributed.engine_cases import losses

    metrics = engine.train_minibatch(rows, losses("lm"), lr=1e-2)
    outputs = engine.forward(rows, with_entropy=True)
    assert outputs.logprobs.any()
    actual = {name: torch.tensor(value, dtype=torch.float64) for name, value in metrics.items()}
    return {**actual, "logprobs": outputs.logprobs, "entropy": outputs.entropy}


def pieces(engine: Any) -> dict[str, Tensor]:
    """Copies of all that a checkpoint keeps of this rank, by name and place."""
    state = engine.state()
    actual = {f"{piece.name} {piece.box}": piece.data.detach().clone() for piece in state.pieces}
    assert len(actual) == len(state.pieces)
    return actual | {f"numbers/{name}": torch.tensor(number) for name, number in state.numbers.items()}


def different(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Names whose tensors are not equal to the bit."""
    assert actual.keys() == expected.keys()
    return [name for name, tensor in actual.items() if not equal_bits(tensor, expected[name])]


def same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    wrong = different(actual, expected)
    assert not wrong, f"{len(wrong)} of {len(actual)} differ: {', '.join(wrong[:5])}"


def kinds(names: Iterable[str]) -> set[str]:
    """The first parts of "exp_avg/model.norm.weight"."""
    return {name.partition("/")[0] for name in names}


def equal_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    as_bytes = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(*as_bytes)


def main() -> None:
    device()  # before anything asks for one
    with world() as ranks:
        folder = Path(broadcast_json(tempfile.mkdtemp(prefix="fsdp_ckpt_") if ranks.rank == 0 else None, ranks))
        if ranks.rank == 0:
            write_tiny_checkpoint(folder / "model")
        ranks.gather_json(None)  # the model is there
    for number, (name, config) in enumerate(cases(folder / "model").items()):
        try:
            a_step_after_loading_is_the_step_after_saving(config, folder / str(number))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
    with world() as ranks:
        if ranks.rank == 0:
            shutil.rmtree(folder)
        finish(ranks)


@pytest.mark.skipif(not FULL, reason="make test-full: half a minute; checkpoint/test_fsdp_engine.py has two ranks")
def test_on_four_ranks() -> None:
    pass_on_four_ranks(main)


if __name__ == "__main__":
    main()
