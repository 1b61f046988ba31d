"""Our attention inside of transformers' models: what it says equals transformers' own plain attention, row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mega_rl.converters.families import FAMILIES
from mega_rl.converters.live.load import model_config
from mega_rl.errors import RunError
from mega_rl.parallel.accelerator import prepare
from tests.helpers.attention_probe import AttentionProbe
from tests.helpers.models import write_tiny_checkpoint

CPU = torch.device("cpu")
LENGTHS = (1, 20, 7, 33)  # in three length classes
KERNELS = ("eager", "sdpa")
# Four layers' sums of up to 64 float32 terms in another order; logits are about 2.
TOLERANCE = 1e-5
WINDOW = {"sliding_window": 6}
SOME_WINDOWS = {**WINDOW, "use_sliding_window": True, "max_window_layers": 2}
# Settings that a family's attention can have and its tiny model has not; gemma3_text has windows anyway.
SETTINGS: dict[str, dict[str, Any]] = {
    "mistral": WINDOW,
    "mixtral": WINDOW,
    "phi3": WINDOW,
    "qwen2": SOME_WINDOWS,
    "qwen2_moe": SOME_WINDOWS,
    "qwen3": SOME_WINDOWS,
    "qwen3_moe": SOME_WINDOWS,
}
CHANGED = [(family, settings) for family in FAMILIES for settings in ({}, SETTINGS.get(family)) if settings is not None]


@pytest.fixture(scope="module", autouse=True)
def attention() -> Any:
    """The module under test: Megatron-Core, which it imports, needs the accelerator to be prepared first."""
    prepare("cpu")
    from mega_rl.engines import fsdp_model as attention

    return attention


@cache
def sequences() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randint(2, 50, (length,), generator=generator) for length in LENGTHS)


def cu_seqlens() -> Tensor:
    return torch.tensor([0, *accumulate(LENGTHS)], dtype=torch.int32)


def model(path: Path, implementation: str) -> Any:
    from transformers import AutoModelForCausalLM

    how: dict[str, Any] = {
        "config": model_config(path),
        "trust_remote_code": False,
        "local_files_only": True,
        "dtype": torch.float32,
    }
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation=implementation, **how).eval()


def alone(actual: Any) -> Tensor:
    """[T, V]: logits of every sequence by itself, one after another."""
    return torch.cat([actual(tokens[None], use_cache=False).logits[0] for tokens in sequences()])


def packed(actual: Any, arguments: dict[str, Any]) -> Tensor:
    """[T, V]: logits of all sequences in one row."""
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    tokens = torch.cat(sequences())[None]
    return actual(tokens, position_ids=positions, use_cache=False, **arguments).logits[0]


def padded(actual: Any, arguments: dict[str, Any]) -> Tensor:
    """[T, V]: logits of all sequences in rows of one length, without those of padding."""
    tokens = torch.nn.utils.rnn.pad_sequence(list(sequences()), batch_first=True)
    positions = torch.arange(tokens.size(1)).expand(len(LENGTHS), -1)
    logits = actual(tokens, position_ids=positions, use_cache=False, **arguments).logits
    return torch.cat([logits[row, :length] for row, length in enumerate(LENGTHS)])


# Layers of other kinds are padded, under transformers' own attention: test_any_model.py.
PACKED = [case for case in CHANGED if not FAMILIES[case[0]].megatron]


@pytest.mark.parametrize(("family", "settings"), PACKED, ids=str)
def test_every_family_as_transformers_computes_it(
    tmp_path: Path, attention: Any, family: str, settings: dict[str, Any]
) -> None:
    """Packed and padded logits of both kernels, windows on and off, and that the named kernel ran in every layer."""
    path = write_tiny_checkpoint(tmp_path / "model", family=family, tied=False, **settings)
    with torch.no_grad():
        expected = alone(model(path, "eager"))
        for kernel in KERNELS:
            actual = model(path, attention.attention_name(kernel))
            forms: list[tuple[Callable[[Any, dict[str, Any]], Tensor], Tensor | None]] = [
                (packed, cu_seqlens()),
                (padded, None),
            ]
            for form, bounds in forms:
                with AttentionProbe() as probe:
                    logits = form(actual, attention.attention_arguments(kernel, bounds, max(LENGTHS), device=CPU))
                assert float((logits - expected).abs().max()) <= TOLERANCE, (kernel, form.__name__)
                classes = 1 if bounds is None else 3
                assert probe.ran == {kernel: classes * len(actual.model.layers)}, form.__name__


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "deepseek_v3"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients(tmp_path: Path, attention: Any, family: str, kernel: str) -> None:
    """Of every parameter, relative to its largest: packed against each sequence alone."""
    path = write_tiny_checkpoint(tmp_path / "model", family=family, tied=False)
    weights = torch.randn(sum(LENGTHS), 50, generator=torch.Generator().manual_seed(1))
    plain, ours = model(path, "eager"), model(path, attention.attention_name(kernel))
    (alone(plain) * weights).sum().backward()
    (
        packed(ours, attention.attention_arguments(kernel, cu_seqlens(), max(LENGTHS), device=CPU)) * weights
    ).sum().backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in ours.named_parameters():
        one, other = parameter.grad, expected[name]
        if other is not None:  # None: a correction of routing, which nothing differentiates
            assert float((one - other).abs().max()) <= 1e-5 * float(other.abs().max().clamp(min=1.0)), name


def test_no_mask_of_all_pairs_is_made(tmp_path: Path, attention: Any) -> None:
    """Nothing of T * T elements, T = 64 sequences of 8: one class of [64, 8, 8]."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            made = result if isinstance(result, (tuple, list)) else [result]
            largest = max(largest, *(x.numel() for x in made if isinstance(x, Tensor)), 0)
            return result

    actual = model(write_tiny_checkpoint(tmp_path / "model"), attention.attention_name("sdpa"))
    bounds = 8 * torch.arange(65, dtype=torch.int32)
    tokens, positions = torch.full((1, 512), 3), torch.arange(8).repeat(64)[None]
    with torch.no_grad(), Sizes():
        actual(
            tokens,
            position_ids=positions,
            use_cache=False,
            **attention.attention_arguments("sdpa", bounds, 8, device=CPU),
        )
    assert 0 < largest < 512 * 512


def heads(*sizes: int) -> list[Tensor]:
    return [torch.ones(1, size, 4, 8) for size in sizes]


def call(module: Any, **arguments: Any) -> Any:
    from transformers import AttentionInterface

    return AttentionInterface()["mega_rl_fused"](module, *heads(4, 2, 2), None, **{"sequences": None, **arguments})


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"softcap": 50.0}, "softcap"),
        ({"attention_bias": torch.zeros(4, 4)}, "attention_bias"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "is_causal=False"),
        ({"output_attentions": True}, "output_attentions"),
    ],
)
def test_what_is_not_computed_is_an_error(attention: Any, arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(RunError, match=f"Thing asks its attention for {named}, which attn_implementation=sdpa"):
        call(type("Thing", (SimpleNamespace,), {})(is_causal=True), **arguments)


def test_a_mask_and_attention_both_ways_are_errors(attention: Any) -> None:
    from transformers import AttentionInterface

    function = AttentionInterface()["mega_rl_eager"]
    with pytest.raises(RunError, match="attention_mask"):
        function(SimpleNamespace(is_causal=True), *heads(4, 2, 2), torch.zeros(1, 1, 4, 4), sequences=None)
    with pytest.raises(RunError, match="is_causal=False"):
        call(SimpleNamespace(is_causal=False))


def test_flash_attention_is_told_of_packed_sequences(attention: Any) -> None:
    """In the words of transformers' own function, which takes nothing else of a packed row."""
    bounds = cu_seqlens()
    actual = attention.attention_arguments("flash_attention_2", bounds, 33, device=CPU)
    assert actual.pop("deterministic") is False
    lengths: Sequence[Any] = [actual[f"max_length_{side}"] for side in "qk"]
    assert lengths == [33, 33]
    assert all(actual[f"cu_seq_lens_{side}"] is bounds for side in "qk")
    assert attention.attention_arguments("flash_attention_2", None, 33, device=CPU) == {"deterministic": False}
    assert attention.attention_name("flash_attention_2") == "flash_attention_2"
    with pytest.raises(KeyError):
        attention.attention_name("flex_attention")
