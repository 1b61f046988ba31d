"""The shrunk twin: what it keeps of a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mega_rl.converters.architecture import is_moe
from mega_rl.converters.hf.config import parse_hf_config, read_hf_config
from mega_rl.converters.safetensors.reader import CheckpointReader
from mega_rl.verify.twin import MAX_LAYERS, shrink, write_twin
from tests.helpers.models import SMALL, TINY, write_tiny_checkpoint
from tests.unit_tests.converters.hub_configs import DEEPSEEK_V3

pytestmark = pytest.mark.slow


def test_a_large_model_fits_a_laptop() -> None:
    """DeepSeek-V3: three layers of 61, few of 256 experts in as many groups, everything else as it is."""
    twin = shrink(parse_hf_config(DEEPSEEK_V3))
    assert twin.layers == (0, 3, 60)
    moe = twin.hf.moe
    assert moe is not None
    assert moe.layers == (False, True, True)
    assert (moe.num_experts, moe.num_groups, moe.topk_groups, moe.top_k) == (16, 8, 4, 8)
    assert (twin.hf.vocab_size, twin.hf.hidden_size, twin.hf.mtp_layers) == (4096, 7168, 0)
    assert twin.hf.quantization is None
    assert twin.hf.rope == parse_hf_config(DEEPSEEK_V3).rope


def test_published_interval_does_not_bind_the_twin() -> None:
    """Qwen3.5 publishes every fourth layer's kind twice; a twin has fewer layers between."""
    layers = {"num_hidden_layers": 8, "full_attention_interval": 4, "layer_types": None}
    hf = parse_hf_config({**SMALL, **TINY["qwen3_5_text"], **layers, "model_type": "qwen3_5_text"})
    twin = shrink(hf).hf
    assert hf.delta is not None and twin.delta is not None  # noqa: PT018
    assert (hf.delta.layers, twin.delta.layers) == ((True, True, True, False) * 2, (True, False, False))


@pytest.mark.parametrize("family", TINY)
def test_every_kind_of_layer_is_kept(family: str, tmp_path: Path) -> None:
    """The twin has the first layer, the last and each kind; its tensors are leading rows of the model's."""
    write_tiny_checkpoint(tmp_path / "model", family=family)
    original = read_hf_config(tmp_path / "model")
    twin = write_twin(tmp_path / "model", tmp_path / "twin")
    assert twin.hf == read_hf_config(tmp_path / "twin")
    assert {0, original.num_layers - 1} <= set(twin.layers)
    assert len(twin.layers) <= MAX_LAYERS + 1

    def kinds(hf, layers):  # type: ignore[no-untyped-def]
        has_window = [hf.window is not None and hf.window.layers[i] for i in range(hf.num_layers)]
        return {(is_moe(hf, i), has_window[i], hf.delta is not None and hf.delta.layers[i]) for i in layers}

    everything = kinds(original, range(original.num_layers))
    assert kinds(original, twin.layers) == kinds(twin.hf, range(twin.hf.num_layers)) == everything
    with CheckpointReader(tmp_path / "model") as model, CheckpointReader(tmp_path / "twin") as small:
        for i, layer in enumerate(twin.layers):
            is_delta = original.delta is not None and original.delta.layers[layer]
            name = "linear_attn.out_proj.weight" if is_delta else "self_attn.o_proj.weight"
            assert torch.equal(small.read(f"model.layers.{i}.{name}"), model.read(f"model.layers.{layer}.{name}"))
