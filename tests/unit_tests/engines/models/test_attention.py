"""Core attention is softmax(q k / sqrt(d)) v within each sequence, to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit_tests.engines.models.attention_cases import GROUPS, HEADS, KERNELS, MIXES, VARIANTS

# Both sides compute in fp64: sums of up to 130 terms in another order.
FP64_TOLERANCE = 1e-12


@pytest.mark.parametrize("mix", list(MIXES))
def test_packed_and_padded_are_explicit_softmax(results: dict[str, Any], mix: str) -> None:
    """Context and gradients of query, key and value; so packed equals padded too."""
    differences = results["attention"]["mixes"][mix]
    assert len(differences) == 8
    assert max(differences.values()) <= FP64_TOLERANCE, differences


@pytest.mark.parametrize("groups", [1, GROUPS, HEADS])
def test_grouped_queries(results: dict[str, Any], groups: int) -> None:
    """Multi-query, grouped-query and multi-head attention."""
    assert max(results["attention"]["groups"][groups].values()) <= FP64_TOLERANCE


@pytest.mark.parametrize("mix", list(MIXES))
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_windows_sinks_and_value_heads(results: dict[str, Any], variant: str, mix: str) -> None:
    """Packed and padded, with the gradient of the sinks: windows and sinks end with their sequence."""
    differences = results["attention"]["variants"][f"{variant}, {mix}"]
    assert len(differences) == (10 if VARIANTS[variant].sinks else 8)
    assert max(differences.values()) <= FP64_TOLERANCE, differences


def test_a_layer_outside_of_the_pattern_has_no_window(results: dict[str, Any]) -> None:
    """Bit for bit."""
    assert results["attention"]["no window"] == 0.0


def test_any_mix_of_lengths(results: dict[str, Any]) -> None:
    """Forty random mixes, by hypothesis."""
    assert 0 < results["attention"]["hypothesis"] <= FP64_TOLERANCE


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.bfloat16, 5e-2)])
def test_training_dtypes(results: dict[str, Any], dtype: torch.dtype, tolerance: float, kernel: str) -> None:
    """fp32 to some units of its last place, bf16 to some of its 8 bits."""
    differences = results["attention"]["dtypes"][kernel, str(dtype)]
    assert max(differences.values()) <= tolerance, differences


@pytest.mark.parametrize("variant", ["window", "latent", "everything"])
def test_kernels_agree(results: dict[str, Any], variant: str) -> None:
    """Context and gradients of eager and sdpa in fp32; not the same bits, or it would be one kernel."""
    assert 0 < results["attention"]["kernels"][variant] <= 5e-6


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_kernel_that_is_named_runs(results: dict[str, Any], kernel: str) -> None:
    """Two length classes, and a padded batch."""
    assert results["attention"]["ran"][kernel] == {kernel: 3}


def test_megatron_core_s_own_setting_is_for_transformer_engine(results: dict[str, Any]) -> None:
    """It ends in the environment: with our core attention it is the same for every role, whatever they run."""
    assert results["attention"]["backends"] == {
        "eager": ("auto", "eager"),
        "sdpa": ("auto", "sdpa"),
        "transformers: sdpa": ("auto", "transformers: sdpa"),  # of engine.backend=fsdp alone
        "transformers: eager": ("auto", "transformers: eager"),
        "te: auto": ("auto", None),
        "te: flash": ("flash", None),
        "te: fused": ("fused", None),
        "te: unfused": ("unfused", None),
    }


@pytest.mark.parametrize("variant", ["plain", "everything", "eager everything"])
@pytest.mark.parametrize("poison", ["0.5", "nan", "inf"])
def test_packed_sequences_never_see_each_other(results: dict[str, Any], poison: str, variant: str) -> None:
    """One sequence overwritten, with NaN too: context and gradients of all others keep every bit."""
    assert results["attention"]["leaks"][f"{poison} {variant}"] == []
