"""Models without a table train on FSDP with transformers' own gradients, and faults of packing are found at start."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from transformers import CONFIG_MAPPING

from mega_rl.converters.hf.config import read_hf_config
from mega_rl.converters.hf.small import shrink
from mega_rl.engines import fsdp_model, fsdp_proof
from mega_rl.engines.fsdp_proof import find_way
from mega_rl.errors import UserError
from mega_rl.rollout import decoding
from mega_rl.verify.layouts import FP32, LayoutErrors
from mega_rl.verify.run import problems
from tests.helpers.selection import FULL
from tests.unit_tests.engines.any_model_cases import measured, rewrite_config, small_config, write_model

pytestmark = pytest.mark.timeout(1200)

FEW = ("phimoe", "olmo_hybrid", "gpt_neox", "lfm2", "gemma2")
MANY = (
    "afmoe", "apertus", "arcee", "bamba", "cohere", "cohere2", "dots1", "ernie4_5", "exaone4", "falcon_h1", "flex_olmo",
    "gpt2", "gpt_oss", "granite", "granitemoe", "helium", "hunyuan_v1_dense", "hy_v3", "jamba", "mamba", "minimax_m2",
    "nemotron", "olmo2", "olmo3", "opt", "phi3", "qwen3_5_text", "qwen3_next", "seed_oss", "smollm3", "stablelm",
    "starcoder2",
)  # fmt: skip
FAMILIES = (*FEW, *MANY) if FULL else FEW


@pytest.fixture(scope="module", params=(1, 2) if FULL else (2,))
def errors(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, LayoutErrors | str]:
    """Those of 1 or 2 ranks, or why there are none."""
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        write_model(folder / family, family)
    return measured(folder, list(FAMILIES), ranks=request.param)


@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_are_those_of_transformers(family: str, errors: dict[str, LayoutErrors | str]) -> None:
    """Exported bits, log-probs, loss, every gradient, and weights after a step."""
    its = errors[family]
    assert isinstance(its, LayoutErrors), its
    assert problems(its, FP32) == []
    assert its.gradients.keys() == its.weights.keys()


def test_only_models_that_may_pack() -> None:
    packs = {family: way_of(family)[1] for family in FEW}
    assert packs == {"phimoe": True, "olmo_hybrid": False, "gpt_neox": True, "lfm2": False, "gemma2": False}


def way_of(family: str) -> Any:
    """(attention, whether it packs) or None, of the shrunk config."""
    return find_way(small_config(family), "auto", True, "cpu")[0]


@pytest.mark.parametrize("family", ["falcon_h1", "jamba", "lfm2", "mamba", "qwen3_next"] if FULL else ["lfm2"])
def test_state_that_leaks_is_found(family: str) -> None:
    assert way_of(family)[1] is False


def test_lost_positions_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions that count on from one sequence to the next, in a model that learns them."""
    assert way_of("gpt2") == ("sdpa", True)

    def without(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in arguments.items() if name != "position_ids"}

    monkeypatch.setattr(fsdp_proof, "accepted", without)
    assert way_of("gpt2")[1] is False


def test_a_lost_window_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert way_of("olmo3") == ("sdpa", True)
    kernels = {
        name: lambda *args, kernel=kernel, **kwargs: kernel(*args, **{**kwargs, "window": None})
        for name, kernel in fsdp_model.KERNELS.items()
    }
    monkeypatch.setattr(fsdp_model, "KERNELS", kernels)
    assert way_of("olmo3")[0] != "sdpa"


def test_left_padding_that_enters_a_convolution_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next

    small, cpu = small_config("qwen3_next"), torch.device("cpu")
    assert decoding.prove_decoding(small, cpu).left_padded
    monkeypatch.setattr(modeling_qwen3_next, "apply_mask_to_padding_states", lambda states, mask: states)
    assert not decoding.prove_decoding(small, cpu).left_padded


def test_a_cache_of_other_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_twice(cache: Any, indices: torch.Tensor) -> None:
        cache.reorder_cache(torch.zeros_like(indices))

    monkeypatch.setattr(decoding, "select_rows", first_twice)
    with pytest.raises(UserError, match=r"model_type=lfm2: decoding with transformers' cache is not its forward"):
        decoding.prove_decoding(small_config("lfm2"), torch.device("cpu"))


def test_a_scan_over_the_wrong_chunks_is_named() -> None:
    way, why = find_way(small_config("nemotron_h"), "auto", True, "cpu")
    repaired = Version(version("transformers")) >= Version("5.15")
    assert (way is not None) == repaired
    assert why.endswith("" if repaired else "without CUDA kernels (huggingface/transformers#47246)")


def test_small_models_keep_layers_that_share_keys() -> None:
    """Gemma 4's E2B: 20 of 35 layers read keys and values of earlier ones."""
    kinds = [*["sliding_attention"] * 4, "full_attention"] * 7
    small = shrink(CONFIG_MAPPING["gemma4_text"](num_hidden_layers=35, layer_types=kinds, num_kv_shared_layers=20))
    assert (small.layer_types, small.num_kv_shared_layers) == ([kinds[0], kinds[4]] * 2, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "nowhere", "auto_map": {"AutoModel": "a.B"}}, "has no such model; code that comes with"),
        ({"model_type": "t5"}, "no class with a language-model head"),
        ({"model_type": "bart"}, "is_encoder_decoder=true"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised weights"),
        ({"hidden_size": "wide"}, "cannot read it: .*'hidden_size'"),
    ],
)
def test_what_cannot_train_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    small_config("stablelm").save_pretrained(tmp_path)
    rewrite_config(tmp_path, **changes)
    with pytest.raises(UserError, match=message) as refused:
        read_hf_config(tmp_path, any_model=True)
    assert len(str(refused.value).splitlines()) == 1


def test_megatron_names_the_engine_that_trains(tmp_path: Path) -> None:
    small_config("stablelm").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"no Megatron table; it trains with engine\.backend=fsdp"):
        read_hf_config(tmp_path)
