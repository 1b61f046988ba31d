"""The core attention against explicit softmax, as run by the one rank of the launch in conftest.py."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.helpers.attention_probe import AttentionProbe
from tests.unit_tests.converters.tiny_configs import TINY

HEADS, GROUPS, DIM = 4, 2, 8
MIXES: dict[str, tuple[int, ...]] = {
    "length 1": (1,),
    "all of length 1": (1, 1, 1),
    "one sequence": (37,),
    "one long among short": (1, 3, 130, 2, 1, 17, 16),
    "at the class borders": (15, 16, 17, 31, 32, 33, 64, 65),
    "of one class": (9, 12, 16, 5),
}


@dataclass(frozen=True)
class Variant:
    """What a model's attention may have beside plain causality."""

    groups: int = GROUPS
    window: int | None = None
    sinks: bool = False
    value_dim: int = DIM
    scale: float | None = None
    kernel: str = "sdpa"


PLAIN = Variant()
EAGER = Variant(kernel="eager")
EVERYTHING = Variant(groups=1, window=17, sinks=True, value_dim=3, scale=0.9)
VARIANTS = {
    "window of one": Variant(window=1),
    "window": Variant(window=5),
    "window longer than any class": Variant(window=200),
    "sinks": Variant(sinks=True),
    "sinks and window": Variant(sinks=True, window=7),
    "latent": Variant(groups=HEADS, value_dim=5, scale=0.3),
    "latent, one group": Variant(groups=1, value_dim=12),
    "everything": EVERYTHING,
    "eager": EAGER,
    "eager latent": Variant(groups=HEADS, value_dim=5, scale=0.3, kernel="eager"),
    "eager everything": replace(EVERYTHING, kernel="eager"),
}
KERNELS = ("eager", "sdpa")


def core_attention(
    variant: Variant = PLAIN, *, layer: int = 1, dtype: torch.dtype = torch.float64, collection: Any = None
) -> Any:
    """The module under test; 4 heads of 8. Only odd layers have the variant's window.

    With a `collection` of groups it has the slices of `collection.cp`.
    """
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    from mega_rl.engines.models.attention import CoreAttention

    config = TransformerConfig(
        num_layers=2,
        hidden_size=HEADS * DIM,
        num_attention_heads=HEADS,
        num_query_groups=variant.groups,
        kv_channels=DIM,
        window_size=None if variant.window is None else (variant.window - 1, 0),
        window_attn_skip_freq=[1, 0],
        softmax_type="learnable" if variant.sinks else "vanilla",
        context_parallel_size=1 if collection is None else collection.cp.size(),
    )
    config.core_attention = variant.kernel
    module = CoreAttention(
        config,
        layer,
        AttnMaskType.causal,
        "self",
        softmax_scale=variant.scale,
        pg_collection=collection,
        v_channels=variant.value_dim,
    )
    if module.softmax_offset is not None:
        offsets = torch.linspace(-1, 2, HEADS, dtype=torch.float64).to(dtype)
        module.softmax_offset = torch.nn.Parameter(offsets)
    return module


def inputs(lengths: Sequence[int], variant: Variant = PLAIN, *, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Packed query [T, heads, D], key [T, groups, D], value [T, groups, E], gradient of the context [T, heads*E]."""
    generator = torch.Generator().manual_seed(sum(lengths) + variant.groups)
    total, groups, wide = sum(lengths), variant.groups, variant.value_dim
    shapes = [(total, HEADS, DIM), (total, groups, DIM), (total, groups, wide), (total, HEADS * wide)]
    tensors = [2 * torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return [tensor.requires_grad_(number < 3) for number, tensor in enumerate(tensors)]


def reference(
    lengths: Sequence[int],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    variant: Variant = PLAIN,
    sinks: Tensor | None = None,
) -> Tensor:
    """[T, heads*E]: scores, mask, softmax and sum written out in fp64, one sequence and one head after the other."""
    query, key, value = (x.double() for x in (query, key, value))
    per_group = HEADS // key.size(1)
    scale = DIM**-0.5 if variant.scale is None else variant.scale
    contexts = []
    for start, stop in itertools.pairwise([0, *itertools.accumulate(lengths)]):
        behind = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
        hidden = (behind < 0) | (behind >= (variant.window or stop))
        heads = []
        for head in range(HEADS):
            q, k, v = (
                x[start:stop, h] for x, h in ((query, head), (key, head // per_group), (value, head // per_group))
            )
            weights = (q @ k.T * scale).masked_fill(hidden, -torch.inf).exp()
            total = weights.sum(-1, keepdim=True)
            if sinks is not None:
                total = total + sinks[head].double().exp()
            heads.append(weights / total @ v)
        contexts.append(torch.cat(heads, dim=-1))
    return torch.cat(contexts)


def packed(module: Any, lengths: Sequence[int], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The module on packed input."""
    from mega_rl.engines.models.attention import packed_sequences

    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    context: Tensor = module(query, key, value, None, packed_seq_params=packed_sequences(bounds, max(lengths)))
    return context.squeeze(1)


def padded(module: Any, lengths: Sequence[int], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The module on right-padded rows [S, B, ...] (padding 1e3, which must not matter), read back packed."""
    rows = [
        torch.nn.utils.rnn.pad_sequence(list(x.split(list(lengths))), padding_value=1e3) for x in (query, key, value)
    ]
    context = module(*rows, None)
    return torch.cat([context[:length, row] for row, length in enumerate(lengths)])


def differences(
    lengths: Sequence[int], variant: Variant = PLAIN, *, dtype: torch.dtype = torch.float64
) -> dict[str, float]:
    """Largest difference to the reference of context and gradients, relative to the largest number of each."""
    module = core_attention(variant, dtype=dtype)
    *given, grad = inputs(lengths, variant, dtype=dtype)
    sinks = [] if module.softmax_offset is None else [module.softmax_offset]
    expected = reference(lengths, *given, variant, *sinks)
    expected_grads = torch.autograd.grad(expected, [*given, *sinks], grad.double())
    worst = {}
    for form, attend in (("packed", packed), ("padded", padded)):
        actual = attend(module, lengths, *given)
        found_grads = torch.autograd.grad(actual, [*given, *sinks], grad)
        names = "oqkvs"[: 4 + len(sinks)]
        for name, one, other in zip(names, (actual, *found_grads), (expected, *expected_grads), strict=True):
            # Of a sequence of one token the gradients of query and key are 0: nothing to be relative to.
            worst[f"{form} {name}"] = float((one - other).abs().max() / other.abs().max().clamp(min=1.0))
    return worst


def kernel_differences(variant: Variant) -> float:
    """Largest difference of one kernel's context and gradients to the other's in float32, relative as above."""
    actual = []
    for kernel in KERNELS:
        tensors = inputs((1, 20, 7, 50), variant, dtype=torch.float32)
        actual.append(_everything(core_attention(replace(variant, kernel=kernel)), (1, 20, 7, 50), tensors))
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in zip(*actual, strict=True))


def kernels_that_ran(variant: Variant) -> dict[str, int]:
    """What a packed and a padded forward computed with."""
    lengths = (1, 20, 7)
    *given, _ = inputs(lengths, variant)
    with AttentionProbe() as probe:
        for attend in (packed, padded):
            attend(core_attention(variant), lengths, *given)
    return dict(probe.ran)


def backends() -> dict[str, tuple[str, str | None]]:
    """(Megatron-Core's own setting, what our core attention reads) for everything that can be chosen."""
    from typing import get_args

    from mega_rl.config.schema import MegatronConfig, ModelConfig
    from mega_rl.converters.hf.config import parse_hf_config
    from mega_rl.engines.models.build import transformer_config
    from mega_rl.engines.models.specs import Attention
    from mega_rl.parallel.layout import ParallelLayout

    actual = {}
    for attention in get_args(Attention):
        if attention != "flash_attention_2":  # of Hugging Face's models alone
            config = transformer_config(
                parse_hf_config(TINY["qwen3"]),
                layout=ParallelLayout(),
                model=ModelConfig(),
                megatron=MegatronConfig(),
                deterministic=False,
                attention=attention,
                device_overrides={},
            )
            actual[attention] = (config.attention_backend.name, vars(config).get("core_attention"))
    return actual


def layers_without_window() -> float:
    """Largest difference to plain attention in the layer that the pattern leaves out."""
    *given, _ = inputs(MIXES["one sequence"])
    windowed, plain = core_attention(Variant(window=5), layer=2), core_attention()
    return float((packed(windowed, (37,), *given) - packed(plain, (37,), *given)).abs().max())


def hypothesis_difference() -> float:
    """Largest of `differences` over many mixes of lengths and numbers of groups."""
    from hypothesis import given, settings
    from hypothesis import strategies as st

    worst = 0.0

    @settings(max_examples=40, deadline=None, database=None, derandomize=True)
    @given(st.lists(st.integers(1, 70), min_size=1, max_size=7), st.sampled_from([1, 2, 4]), st.sampled_from(KERNELS))
    def check(lengths: list[int], groups: int, kernel: str) -> None:
        nonlocal worst
        worst = max(worst, *differences(lengths, Variant(groups=groups, kernel=kernel)).values())
        assert worst < 1e-9, f"{lengths} groups={groups} {kernel}"

    check()
    return worst


def leaks(lengths: Sequence[int], poison: float, variant: Variant = PLAIN) -> list[str]:
    """What of the others changes, by a single bit, when one sequence's q, k, v and gradient become `poison`."""
    module = core_attention(variant)
    before = _everything(module, lengths, inputs(lengths, variant))
    changed = []
    bounds = [0, *itertools.accumulate(lengths)]
    for victim, (start, stop) in enumerate(itertools.pairwise(bounds)):
        spoiled = inputs(lengths, variant)
        for tensor in spoiled:
            tensor.data[start:stop] = poison
        others = torch.ones(bounds[-1], dtype=torch.bool)
        others[start:stop] = False
        after = _everything(module, lengths, spoiled)
        changed += [
            f"{name} of the others of sequence {victim}"
            for name, one, other in zip("oqkv", before, after, strict=True)
            if not torch.equal(one[others], other[others])
        ]
        assert not torch.equal(before[0], after[0])
    return changed


def _everything(module: Any, lengths: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
    *given, grad = tensors
    context = packed(module, lengths, *given)
    return [context.detach(), *torch.autograd.grad(context, given, grad)]


def attention_cases() -> dict[str, Any]:
    """Everything test_attention.py looks at."""
    return {
        "mixes": {name: differences(lengths) for name, lengths in MIXES.items()},
        "groups": {groups: differences((1, 20, 7), Variant(groups=groups)) for groups in (1, 2, 4)},
        "variants": {
            f"{name}, {mix}": differences(lengths, variant)
            for name, variant in VARIANTS.items()
            for mix, lengths in MIXES.items()
        },
        "no window": layers_without_window(),
        "dtypes": {
            (kernel, str(dtype)): differences((1, 20, 7, 50), Variant(kernel=kernel), dtype=dtype)
            for kernel in KERNELS
            for dtype in (torch.float32, torch.bfloat16)
        },
        "kernels": {variant: kernel_differences(VARIANTS[variant]) for variant in ("window", "latent", "everything")},
        "backends": backends(),
        "ran": {kernel: kernels_that_ran(Variant(kernel=kernel)) for kernel in KERNELS},
        "hypothesis": hypothesis_difference(),
        "leaks": {
            f"{poison} {name}": leaks(MIXES["one long among short"], poison, variant)
            for poison in (0.5, float("nan"), float("inf"))
            for name, variant in (
                ("plain", PLAIN),
                ("everything", EVERYTHING),
                ("eager everything", replace(EVERYTHING, kernel="eager")),
            )
        },
    }
