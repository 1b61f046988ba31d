"""EmbeddedWeightSync: what arrives, what it says of it, and that damage does not go unseen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch import Tensor

from mega_rl.rollout.embedded import EmbeddedWeightSync, HFRolloutEngine, checksum
from tests.unit_tests.rollout.tiny_qwen3 import Checkpoint, make_engine, make_prompts

SQUARE = "model.layers.0.self_attn.o_proj.weight"


class DamagingEngine:
    """A real engine behind a line that changes what passes."""

    def __init__(self, engine: HFRolloutEngine, damage: Callable[[str, Tensor], Tensor | None]) -> None:
        self.engine, self.weights = engine, engine.weights
        self.damage = damage
        self.finished: list[int] = []

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        arrived = [(name, self.damage(name, tensor)) for name, tensor in weights]
        self.engine.load_weights([(name, tensor) for name, tensor in arrived if tensor is not None])

    def checksums(self, names: Iterable[str]) -> dict[str, str]:
        return self.engine.checksums(names)

    def finish_update(self, version: int) -> None:
        self.engine.finish_update(version)
        self.finished.append(version)


def exporter(checkpoint: Checkpoint) -> Callable[[], Iterator[tuple[str, Tensor]]]:
    return lambda: iter([(k, v) for k, v in checkpoint.model.state_dict().items() if k != "lm_head.weight"])


def sync_to(engine: object, checkpoint: Checkpoint, *, verify_interval: int = 3) -> EmbeddedWeightSync:
    return EmbeddedWeightSync(
        exporter(checkpoint),
        engine,  # type: ignore[arg-type]
        verify_interval=verify_interval,
    )


# -- checksums --------------------------------------------------------------------------------------------


def test_checksum_sees_values_shape_dtype_and_layout() -> None:
    tensor = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    base = checksum(tensor, torch.float32)
    assert base.startswith("float32[4, 4]:")
    assert len(base.rpartition(":")[2]) == 16
    flipped = tensor.clone()
    flipped.view(torch.int32)[2, 1] ^= 1
    others = [
        checksum(flipped, torch.float32),
        checksum(tensor.T, torch.float32),
        checksum(tensor.reshape(2, 8), torch.float32),
        checksum(tensor, torch.bfloat16),
        checksum(tensor.view(torch.int32), torch.int32),
    ]
    assert len({digest.rpartition(":")[2] for digest in [base, *others]}) == 6, "the digits alone tell them apart"


# -- publishing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_publish_sends_everything_and_says_so(checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    engine = make_engine(checkpoint, load=False, dtype=dtype)
    sync = sync_to(engine, checkpoint)
    assert sync.weight_version == 0
    metrics = sync.publish()
    weights = dict(exporter(checkpoint)())
    assert metrics["rollout/weight_version"] == sync.weight_version == 1
    assert metrics["sync/tensors"] == len(weights)
    assert metrics["sync/bytes"] == sum(tensor.nbytes for tensor in weights.values())
    for name, tensor in weights.items():
        assert torch.equal(engine.model.state_dict()[name], tensor.to(dtype))
    assert engine.generate(make_prompts([3]), [0], n=1, seed=(0,)).weight_version.tolist() == [1]


def test_first_and_every_third_publish_is_verified(checkpoint: Checkpoint) -> None:
    engine = make_engine(checkpoint, load=False)
    sync = sync_to(engine, checkpoint, verify_interval=3)
    assert [sync.publish()["sync/verified"] for _ in range(7)] == [1, 0, 0, 1, 0, 0, 1]
    assert sync.weight_version == 7


# -- damage -----------------------------------------------------------------------------------------------------------


def flip_one_bit(name: str, tensor: Tensor) -> Tensor:
    if name != SQUARE:
        return tensor
    damaged = tensor.clone()
    damaged.view(torch.int32)[17, 5] ^= 1  # the last bit of one mantissa
    return damaged


def transpose_square(name: str, tensor: Tensor) -> Tensor:
    return tensor.T if name == SQUARE else tensor


def never_arrives(name: str, tensor: Tensor) -> Tensor | None:
    return None if name == SQUARE else tensor


@pytest.mark.parametrize("damage", [flip_one_bit, transpose_square, never_arrives])
def test_damage_is_found_on_the_first_publish(checkpoint: Checkpoint, damage: Callable[[str, Tensor], Tensor]) -> None:
    engine = DamagingEngine(make_engine(checkpoint, load=False), damage)
    with torch.no_grad():  # unset memory could by chance be right
        engine.engine.model.get_parameter(SQUARE).zero_()
    sync = sync_to(engine, checkpoint)
    with pytest.raises(RuntimeError) as caught:
        sync.publish()
    sent = checksum(checkpoint.model.state_dict()[SQUARE], torch.float32)
    received = engine.engine.checksums([SQUARE])[SQUARE]
    assert f"{SQUARE}: sent {sent}, received {received}" in str(caught.value)
    assert str(caught.value).startswith("1 of ")
    assert "version 1" in str(caught.value)
    assert sync.weight_version == 0
    assert engine.finished == []


def test_a_weight_that_never_arrives_is_found_without_verification(checkpoint: Checkpoint) -> None:
    engine = DamagingEngine(make_engine(checkpoint, load=False), lambda name, tensor: tensor)
    sync = sync_to(engine, checkpoint, verify_interval=100)
    sync.publish()
    engine.damage = never_arrives
    with pytest.raises(RuntimeError, match=f"not written by the update to version 2: {SQUARE}"):
        sync.publish()
    assert sync.weight_version == 1
