"""The shrunk twin: what it keeps of a model, and what a wrong conversion makes it say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mega_rl.converters.architecture import is_moe
from mega_rl.converters.hf.config import parse_hf_config, read_hf_config
from mega_rl.converters.safetensors.reader import CheckpointReader
from mega_rl.converters.safetensors.writer import write_checkpoint
from mega_rl.plan.preflight.checkpoints import known_bug
from mega_rl.verify.twin import GATE, MAX_LAYERS, Parity, compare_twin, judge, shrink, write_twin
from tests.helpers.models import TINY, write_tiny_checkpoint
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


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DeepSeek-V3: dense layer 0, mixtures after it."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("twin") / "model", family="deepseek_v3", vocab_size=64)


def changed(source: Path, target: Path, name: str) -> Path:
    """The checkpoint with two rows of a tensor exchanged: every sum and norm stays."""
    with CheckpointReader(source) as reader:
        tensors = {key: reader.read(key) for key in reader.tensors}
    tensors[name][[0, 1]] = tensors[name][[1, 0]]
    return write_checkpoint(target, tensors.items(), files={"config.json": source / "config.json"})


def test_equal_models_agree(mixture: Path) -> None:
    """Far below the gate: what is left is the order of float32 sums."""
    parity = compare_twin(mixture, mixture, num_tokens=24)
    assert parity.good
    assert parity.max_abs < GATE / 10
    assert parity.first_layer is None


def test_reference_takes_the_tensors_that_transformers_takes(mixture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A converter that reads another tensor under a name reads it for its own side only."""
    name = "model.layers.0.self_attn.o_proj.weight"
    assert compare_twin(mixture, mixture, num_tokens=24).details == ()
    read_rows = CheckpointReader.read_rows

    def wrong(self: CheckpointReader, tensor: str, low: int, high: int) -> torch.Tensor:
        rows = read_rows(self, tensor, low, high)
        return rows.flip(0) if tensor == name else rows

    monkeypatch.setattr(CheckpointReader, "read_rows", wrong)
    parity = compare_twin(mixture, mixture, num_tokens=24)
    assert (parity.good, parity.first_layer) == (False, 0)


def test_reference_too_large_for_memory_is_named(mixture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mega_rl.verify.twin._LOAD_BYTES", 1 << 40)
    parity = compare_twin(mixture, mixture, num_tokens=24)
    assert parity.good
    assert "over half of the memory" in parity.details[-1]


def test_missing_family_is_computed_by_stand_in(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path / "model", family="kimi_k2", tied=False)
    parity = compare_twin(path, path, num_tokens=24)
    assert parity.max_abs < GATE / 10


@pytest.mark.parametrize(
    ("name", "layer", "words"),
    [
        ("model.layers.0.self_attn.o_proj.weight", 0, "layer 0"),
        ("model.layers.1.mlp.gate.weight", 1, "layer 1"),
        ("model.layers.3.mlp.experts.0.down_proj.weight", 3, "layer 3"),
        ("model.norm.weight", None, "all layers agree: look at the final norm"),
    ],
)
def test_the_first_diverging_layer_is_named(
    mixture: Path, tmp_path: Path, name: str, layer: int | None, words: str
) -> None:
    """By its number in the whole model, with what is special about it."""
    parity = compare_twin(mixture, changed(mixture, tmp_path / "changed", name), num_tokens=24)
    assert not parity.good
    assert parity.max_abs > 10 * GATE
    assert parity.first_layer == layer
    assert words in parity.details[-1]
    assert len(parity.details) == 1 + 3  # a line for each layer of the twin, and the verdict


def test_known_reference_fault_is_not_reported(tmp_path: Path) -> None:
    """DeepSeek-V2 with YaRN: transformers before 5.15 is wrong, which is said; any other gap is ours."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
    scaling |= {"mscale": 0.707, "mscale_all_dim": 0.707, "beta_fast": 32.0, "beta_slow": 1.0}
    path = write_tiny_checkpoint(tmp_path / "model", family="deepseek_v2", rope_parameters=scaling)
    parity, hf = compare_twin(path, path, num_tokens=24), read_hf_config(path)
    assert parity.good
    assert [known_bug(hf, transformers=release) is None for release in ("5.14.1", "5.15.0")] == [False, True]
    if known_bug(hf) is None:
        assert parity.max_abs <= GATE
        return
    assert parity.max_abs > 10 * GATE
    assert "not comparable" in parity.summary
    assert "47435" in parity.details[0]


@pytest.mark.parametrize(("deviation", "good"), [(0.1, False), (1.0, False), (10.0, True)])
def test_gate_grows_with_the_logits(deviation: float, good: bool) -> None:
    """Gemma 3 270M's logits have a deviation of 9.9, and float32 rounds them by 2e-4."""
    twin, logits = shrink(parse_hf_config(DEEPSEEK_V3)), deviation * torch.randn(1, 64, 64)
    same = [(torch.zeros(1, 2, 4),) * 2] * len(twin.layers)
    assert judge(twin, logits, logits + 2 * GATE, same).good == good


def test_nan_is_a_difference() -> None:
    """No comparison with nan holds, so the gate must not be written the other way round."""
    twin = shrink(parse_hf_config(DEEPSEEK_V3))
    logits = torch.zeros(1, 2, 3)
    hidden = [(torch.zeros(1, 2, 4), torch.full((1, 2, 4), float("nan")))] * len(twin.layers)
    parity = judge(twin, logits, logits + float("nan"), hidden)
    assert isinstance(parity, Parity)
    assert not parity.good
    assert parity.first_layer == 0
