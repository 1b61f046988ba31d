"""State of a model under PyTorch's FSDP2: every parameter cut into rows, FP32, as `torch.chunk` cuts them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from math import prod
from typing import NamedTuple

from mega_rl.config.schema import Config
from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.plan.blocks import source_shape
from mega_rl.converters.plan.parameters import in_model_order
from mega_rl.converters.plan.sharding import Head
from mega_rl.plan.setup import PlannedModel, RunSetup
from mega_rl.plan.state_bytes import StateBytes

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
    parameters = list(transformers_parameters(model.hf, model.head, setup.config.model.frozen))
    if not model.trainable:
        parameters = [parameter._replace(trained=False) for parameter in parameters]
    state = sharded_state(parameters, ranks=ranks, index=rank % ranks)
    if not setup.config.engine.fsdp.reduce_every_microbatch:
        whole = sum(parameter.rows * parameter.width for parameter in parameters if parameter.trained)
        state += StateBytes(gradients=whole * FP32)
    if setup.config.engine.fsdp.cpu_offload:
        return StateBytes(host=state.device)
    return state


def sharded_state(parameters: Iterable[Rows], *, ranks: int, index: int) -> StateBytes:
    """Return the bytes of FP32 shards: weights and gradients in padded memory, moments of a rank's own rows."""
    total = StateBytes()
    for parameter in parameters:
        padded = parameter.padded(ranks) * FP32
        if parameter.trained:
            total += StateBytes(padded, padded, 2 * parameter.held(ranks, index) * FP32)
        else:
            total += StateBytes(padded)
    return total


def shard_ranks(config: Config, world_size: int) -> int:
    """Return the ranks that hold one copy of weights and optimizer state between them."""
    return config.engine.fsdp.shard_ranks or world_size


def transformers_parameters(hf: HFConfig, head: Head, frozen: Iterable[str] = ()) -> Iterator[Rows]:
    """Yield the parameters of transformers' model: tensors as on disk, but all experts of a layer in one."""
    patterns, seen = list(frozen), set()
    for part in in_model_order(hf, head):
        rule = part.rule
        if rule.param.endswith("expert_bias"):
            continue  # a buffer
        for source in rule.sources:
            name = source.name.format(layer=part.layer, expert=part.expert)
            layer = part.layer if rule.scope == "layer" else -1
            shape = source_shape(source, hf)
            if rule.per_expert and not source.stacked:
                # Gate and up, and all experts: one tensor whose first dimension counts experts.
                assert hf.moe is not None
                second = "linear_fc2" in rule.param
                name = f"model.layers.{part.layer}.mlp.experts.{'down_proj' if second else 'gate_up_proj'}"
                shape = (hf.moe.num_experts, prod(shape) * len(rule.sources))
            if name in seen:
                continue
            seen.add(name)
            trained = not any(fnmatchcase(name, pattern) for pattern in patterns)
            yield Rows(name, shape[0], prod(shape[1:]), trained, layer)
