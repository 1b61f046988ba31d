"""State of a model under PyTorch's FSDP2: every parameter cut into rows, FP32, as `torch.chunk` cuts them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from functools import lru_cache
from math import prod
from typing import NamedTuple

from mega_rl.config.schema import Config
from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.plan.blocks import source_shape
from mega_rl.converters.plan.parameters import Part, stage_experts, stage_parts
from mega_rl.converters.plan.sharding import Head, Sharding
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.plan.setup import PlannedModel, RunSetup
from mega_rl.plan.state.sizes import StateBytes

FP32 = 4


class Rows(NamedTuple):
    """A parameter as FSDP2 sees it: rows of equal width."""

    name: str
    rows: int
    width: int
    trained: bool = True
    layer: int = -1  # -1: none

    def padded(self, ranks: int) -> int:
        """Return the elements that every rank has room for."""
        return -(-self.rows // ranks) * self.width

    def held(self, ranks: int, index: int) -> int:
        """Return the elements that are a rank's own."""
        each = -(-self.rows // ranks)
        return max(0, min(self.rows, (index + 1) * each) - index * each) * self.width


def fsdp_state(setup: RunSetup, model: PlannedModel, rank: int) -> StateBytes:
    """Return the bytes of a model of the FSDP engine on a global rank, once gradients are there."""
    ranks = shard_ranks(setup.config, setup.machine.world_size)
    frozen = tuple(setup.config.model.frozen) if model.trainable else ("*",)
    parameters = transformers_parameters(model.hf, model.head, frozen)
    state = sharded_state(parameters, ranks=ranks, index=rank % ranks)
    if not setup.config.engine.fsdp.reduce_every_microbatch:
        whole = sum(parameter.rows * parameter.width for parameter in parameters if parameter.trained)
        state += StateBytes(gradients=whole * FP32)
    if setup.config.engine.fsdp.cpu_offload:
        return StateBytes(host=state.device)
    return state


def sharded_state(parameters: Iterable[Rows], *, ranks: int, index: int) -> StateBytes:
    """Return the bytes of FP32 shards: weights and gradients in padded memory, moments of a rank's own rows."""
    weights = gradients = moments = 0
    for parameter in parameters:
        padded = parameter.padded(ranks)
        weights += padded
        if parameter.trained:
            gradients += padded
            moments += 2 * parameter.held(ranks, index)
    return StateBytes(weights * FP32, gradients * FP32, moments * FP32)


def shard_ranks(config: Config, world_size: int) -> int:
    """Return the ranks that hold one copy of weights and optimizer state between them."""
    return config.engine.fsdp.shard_ranks or world_size


@lru_cache(maxsize=64)
def transformers_parameters(hf: HFConfig, head: Head, frozen: tuple[str, ...] = ()) -> tuple[Rows, ...]:
    """Return the parameters of transformers' model: tensors as on disk, but all experts of a layer in one.

    frozen: `model.frozen`, patterns of transformers' names.
    """
    whole = Sharding(hf, ParallelLayout(), spec="hf", head=head)
    parts = [*stage_parts(whole, 0, 0), *stage_experts(whole, 0, 0, range(1))]
    rows: dict[str, Rows] = {}
    for part in parts:
        if part.rule.param.endswith("expert_bias"):
            continue  # a buffer
        for name, shape in _tensors(part, hf):
            trained = not any(fnmatchcase(name, pattern) for pattern in frozen)
            layer = part.layer if part.rule.scope == "layer" else -1
            rows.setdefault(name, Rows(name, shape[0], prod(shape[1:]), trained, layer))
    return tuple(rows.values())


def _tensors(part: Part, hf: HFConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name, shape) of the tensors behind a parameter, as transformers' modules hold them."""
    rule = part.rule
    if rule.per_expert and not rule.sources[0].stacked:
        # One tensor whose first dimension counts experts; it holds gate and up.
        assert hf.moe is not None
        name = "down_proj" if "linear_fc2" in rule.param else "gate_up_proj"
        size = sum(prod(source_shape(source, hf)) for source in rule.sources)
        yield f"model.layers.{part.layer}.mlp.experts.{name}", (hf.moe.num_experts, size)
        return
    for source in rule.sources:
        yield source.name.format(layer=part.layer, expert=part.expert), source_shape(source, hf)
