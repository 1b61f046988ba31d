"""Quantised matrices, decoded as they are read, against the dequantisers of transformers and compressed-tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from mega_rl.converters.hf.config import parse_hf_config, read_hf_config
from mega_rl.converters.live.load import check_tensors
from mega_rl.converters.offline.convert import export_checkpoint, import_hf
from mega_rl.converters.plan.parameters import as_on_disk
from mega_rl.converters.safetensors import reader as reading
from mega_rl.converters.safetensors.quantised import FP4_VALUES, quantisation_loss
from mega_rl.converters.safetensors.reader import CheckpointReader, same_bits
from mega_rl.errors import UserErrors
from tests.unit_tests.converters.random_checkpoints import write_random
from tests.unit_tests.converters.tiny_configs import TINY
from tests.unit_tests.converters.wrapped import rewrite, tensors_of

INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {"weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 8}}
    },
}


FP8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
FP8 = FP8[FP8.isfinite()]


def fp8(block: tuple[int, int] | None) -> dict[str, Any]:
    return {"quant_method": "fp8", "weight_block_size": block and list(block)}


def write(folder: Path, quantization: dict[str, Any], **tensors: Tensor) -> CheckpointReader:
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    save_file(tensors, folder / "model.safetensors")
    return CheckpointReader(folder)


def assert_reads(reader: CheckpointReader, name: str, expected: Tensor) -> None:
    """The whole tensor, every row alone, and rectangles that cut blocks and words, bit for bit."""
    assert same_bits(reader.read(name), expected)
    matrix = expected.reshape(-1, expected.shape[-1])
    rows, cols = matrix.shape
    for low, high in [(i, i + 1) for i in range(rows)] + [(rows // 3, rows - 1)]:
        for left, right in [(0, cols), (3, cols - 2), (cols // 2, cols // 2 + 1)]:
            block = reader.read_block(name, (low, high), (left, right))
            assert same_bits(block, matrix[low:high, left:right].contiguous()), (low, high, left, right)


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several windows of a few rows for each read."""
    monkeypatch.setattr(reading, "_WINDOW_BYTES", 8192)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu], ids=str)
@pytest.mark.parametrize("block", [(4, 8), (12, 16), (1, 48), None], ids=str)
def test_fp8_blocks_are_those_of_transformers(
    block: tuple[int, int] | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    high, wide = block or (24, 48)
    stored = torch.randn(24, 48).to(torch.float8_e4m3fn)
    scales = (torch.rand(24 // high, 48 // wide) + 0.01).to(dtype)
    more = {"a.activation_scale": torch.ones(1)} if block is None else {}
    reader = write(tmp_path, fp8(block), **{"a.weight": stored, "a.weight_scale_inv": scales, **more})
    expected = Fp8Dequantize(None)._dequantize_one(stored, scales, output_dtype=torch.bfloat16)
    assert list(reader.tensors) == ["a.weight"]
    assert_reads(reader, "a.weight", expected)


# kind, type of the scales -> rows and columns of a block, values, scale of a block by its least and its largest value
FORMATS: dict[tuple[str, torch.dtype], tuple[int, int, Tensor, Callable[[float, float], float]]] = {
    ("fp8", torch.float32): (4, 8, FP8, lambda low, high: max(-low, high) / 448),
    ("fp8", torch.float8_e8m0fnu): (4, 8, FP8, lambda low, high: 2.0 ** math.ceil(math.log2(max(-low, high) / 448))),
    ("mxfp4", torch.uint8): (
        1,
        32,
        torch.tensor(FP4_VALUES),
        lambda low, high: 2.0 ** (math.frexp(max(-low, high))[1] - 3),
    ),
    ("int4", torch.float32): (1, 8, torch.arange(-8.0, 8.0), lambda low, high: max(-low / 8, high / 7)),
}


@pytest.mark.parametrize(("kind", "dtype"), FORMATS, ids=str)
def test_quantising_again_loses_the_distance_to_the_nearest_values(kind: str, dtype: torch.dtype) -> None:
    """Found by search, at the edges, too; what a format has lost once it loses no more."""
    high, wide, values, scale_of = FORMATS[kind, dtype]
    original = torch.randn(10, 64 if kind == "mxfp4" else 20)
    nearest = original.clone()
    for row in range(0, original.shape[0], high):
        for col in range(0, original.shape[1], wide):
            block = original[row : row + high, col : col + wide]
            grid = values * scale_of(float(block.min()), float(block.max()))
            chosen = (block[..., None] - grid).abs().argmin(-1)
            nearest[row : row + high, col : col + wide] = grid[chosen]
    packed: Any = SimpleNamespace(kind=kind, block=(high, wide), scales=SimpleNamespace(dtype=dtype))

    def loss(matrix: Tensor) -> float:
        return quantisation_loss(packed, matrix.T[None] if kind == "mxfp4" else matrix)

    expected = float((nearest - original).norm() / original.norm())
    assert 0.01 < expected < 0.2
    assert loss(original) == pytest.approx(expected, rel=1e-5)
    assert loss(nearest) < 1e-6
    assert loss(torch.zeros_like(original)) == 0.0


def test_one_fp8_scale_may_be_a_scalar(tmp_path: Path) -> None:
    stored, scale = torch.randn(6, 10).to(torch.float8_e4m3fn), torch.tensor(0.37)
    reader = write(tmp_path, fp8(None), **{"a.weight": stored, "a.weight_scale_inv": scale})
    assert_reads(reader, "a.weight", (stored.float() * scale).bfloat16())


def test_mxfp4_is_that_of_transformers(tmp_path: Path) -> None:
    """All bytes, and all scales but those that overflow; X is transposed to [experts, input, output]."""
    blocks = torch.arange(3 * 10 * 2 * 16).view(3, 10, 2, 16).to(torch.uint8)
    scales = torch.randint(0, 250, (3, 10, 2), dtype=torch.uint8)
    reader = write(tmp_path, {"quant_method": "mxfp4"}, x_blocks=blocks, x_scales=scales, x_bias=torch.ones(3, 10))
    assert sorted(reader.tensors) == ["x", "x_bias"]
    assert_reads(reader, "x", convert_moe_packed_tensors(blocks, scales))


def pack(values: Tensor) -> Tensor:
    """Return values of -8 to 7 as compressed-tensors packs them: 8 to a word, shifted by 8, the first lowest."""
    shifted = (values + 8).view(values.shape[0], -1, 8).long()
    words = (shifted << torch.arange(0, 32, 4)).sum(2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_int4_groups_are_those_of_compressed_tensors(groups: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """Its formula: the integer in the scale's type, times the scale; then the model's type."""
    values = torch.randint(-8, 8, (6, 32))
    scale = torch.rand(6, groups).to(dtype)
    stored = {"a.weight_packed": pack(values), "a.weight_scale": scale, "a.weight_shape": torch.tensor([6, 32])}
    reader = write(tmp_path, INT4, **stored)
    assert list(reader.tensors) == ["a.weight"]
    expected = values.to(dtype) * scale.repeat_interleave(32 // groups, 1)
    assert_reads(reader, "a.weight", expected.bfloat16())


def test_scales_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    stored = torch.ones(24, 48).to(torch.float8_e4m3fn)
    wrong = {
        "a.weight_scale_inv": (fp8((4, 8)), {"a.weight": stored, "a.weight_scale_inv": torch.ones(6, 7)}),
        "x_scales": ({}, {"x_blocks": torch.ones(2, 3, 1, 16).byte(), "x_scales": torch.ones(2, 3, 2).byte()}),
        "a.weight_scale": (INT4, {"a.weight_packed": torch.ones(2, 4).int(), "a.weight_scale": torch.ones(2, 5)}),
    }
    for name, (quantization, tensors) in wrong.items():
        with pytest.raises(UserErrors, match=f"{name} is .* it must be"):
            write(tmp_path, quantization, **tensors)


def test_gpt_oss_in_mxfp4_leaves_in_bfloat16(tmp_path: Path) -> None:
    """Through a distributed checkpoint; unchanged tensors keep their bytes, and config.json says no more mxfp4."""
    source = write_random(tmp_path / "hf", "gpt_oss", num_hidden_layers=2, hidden_size=64, intermediate_size=32)
    tensors, expected = tensors_of(source), tensors_of(source)
    for name in [name for name in tensors if name.endswith("_proj") and "experts" in name]:
        experts, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, outputs, inputs // 32, 16)).byte()
        tensors[f"{name}_scales"] = torch.randint(100, 140, (experts, outputs, inputs // 32)).byte()
        expected[name] = convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
    rewrite(source, tensors)
    with CheckpointReader(source) as reader, pytest.raises(UserErrors, match=r"config\.json has no mxfp4"):
        check_tensors(reader, read_hf_config(source), "lm")
    rewrite(source, tensors, quantization_config={"quant_method": "mxfp4"})
    import_hf(source, tmp_path / "dist")
    assert export_checkpoint(tmp_path / "dist", tmp_path / "back").config_changes == ("quantization_config",)
    actual = tensors_of(tmp_path / "back")
    assert actual.keys() == expected.keys()
    assert [name for name in actual if not same_bits(actual[name], expected[name])] == []
    assert "quantization_config" not in json.loads((tmp_path / "back/config.json").read_text())


def test_kimi_in_int4_inside_its_wrapper(tmp_path: Path) -> None:
    """The experts are packed, the tower is not; quantization_config goes from inside text_config."""
    plain = write_random(tmp_path / "hf", "kimi_k2", num_hidden_layers=2)
    text = {**TINY["kimi_k2"], "num_hidden_layers": 2, "quantization_config": INT4}
    stored, expected = {}, {}
    for name, tensor in tensors_of(plain).items():
        name = f"language_model.{name}"
        stored[name] = expected[name] = tensor
        if ".experts." in name:
            values, scale = torch.randint(-8, 8, tensor.shape), torch.rand(len(tensor), tensor.shape[1] // 8).bfloat16()
            prefix = name.removesuffix("weight")
            del stored[name]
            stored |= {f"{name}_packed": pack(values), f"{name}_scale": scale}
            stored[f"{prefix}weight_shape"] = torch.tensor(tensor.shape)
            expected[name] = values.bfloat16() * scale.repeat_interleave(8, 1)
    tower = {"vision_tower.patch.weight": torch.randn(3, 4).half(), "mm_projector.bias": torch.randn(5)}
    rewrite(plain, stored | tower)
    wrapper = {"model_type": "kimi_k25", "text_config": text, "vision_config": {}, "dtype": "bfloat16"}
    (plain / "config.json").write_text(json.dumps(wrapper))
    with CheckpointReader(plain) as reader:
        shapes = {name: info.shape for name, info in reader.tensors.items()}
        check_tensors(reader, as_on_disk(read_hf_config(plain), shapes), "lm")
    import_hf(plain, tmp_path / "dist")
    report = export_checkpoint(tmp_path / "dist", tmp_path / "back", reference=plain)
    assert report.config_changes == ("text_config",)
    actual = tensors_of(tmp_path / "back")
    assert actual.keys() == (expected | tower).keys()
    assert [name for name, tensor in (expected | tower).items() if not same_bits(actual[name], tensor)] == []
    config = json.loads((tmp_path / "back/config.json").read_text())
    del text["quantization_config"]
    assert config == wrapper | {"text_config": text}


@pytest.mark.parametrize(
    "change",
    [{"num_bits": 8}, {"symmetric": False}, {"strategy": "tensor"}, {"actorder": "group"}, {"type": "float"}],
    ids=str,
)
def test_other_packings_are_refused(change: dict[str, Any]) -> None:
    weights = INT4["config_groups"]["group_0"]["weights"] | change  # type: ignore[index]
    groups = {"config_groups": {"group_0": {"weights": weights}}}
    with pytest.raises(UserErrors, match="symmetric groups of 4 bits"):
        parse_hf_config({**TINY["kimi_k2"], "quantization_config": INT4 | groups})
    assert parse_hf_config({**TINY["kimi_k2"], "quantization_config": INT4}).quantization == "int4"
