"""Names of layouts: what they stand for, on how many ranks, and what is refused for which reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.hf.config import parse_hf_config, read_hf_config
from mega_rl.converters.offline.compare import describe
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.converters.safetensors.reader import CheckpointReader
from mega_rl.errors import UserError
from mega_rl.verify.layouts import BF16, BF16_EXPERTS, FP32, Layout, resolve, tolerances
from mega_rl.verify.twin import random_tensors, write_random_twin
from tests.unit_tests.converters.tiny_configs import TINY
from tests.unit_tests.verify.cases import bare_config


def model(family: str) -> HFConfig:
    return parse_hf_config(TINY[family])


def sizes(layout: Layout) -> dict[str, object]:
    """What of a layout is not as on one rank."""
    usual = Layout("")
    names = ("tp", "sp", "pp", "vpp", "cp", "ep", "etp", "dp")
    return {name: getattr(layout, name) for name in names if getattr(layout, name) != getattr(usual, name)}


# name -> (family, sizes, ranks, title)
RESOLVED = {
    "tp2": ("qwen3", {"tp": 2, "etp": 2}, 2, "tp2"),
    "tp2+sp": ("qwen3", {"tp": 2, "sp": True, "etp": 2}, 2, "tp2+sp"),
    "tp2pp2": ("qwen3", {"tp": 2, "pp": 2, "etp": 2}, 4, "tp2pp2"),
    "pp2-vpp2": ("qwen3", {"pp": 2, "vpp": 2}, 2, "pp2-vpp2"),
    "vpp2": ("qwen3", {"pp": 2, "vpp": 2}, 2, "vpp2 (pp2)"),
    "tp2+dp2": ("qwen3", {"tp": 2, "dp": 2, "etp": 2}, 4, "tp2+dp2"),
    "ep2": ("qwen3_moe", {"ep": 2}, 2, "ep2"),
    "ep2+etp2": ("qwen3_moe", {"ep": 2, "etp": 2, "tp": 2, "sp": True}, 4, "ep2+etp2 (tp2+sp)"),
    "tp2+ep2+sp": ("qwen3_moe", {"tp": 2, "ep": 2, "sp": True}, 2, "tp2+ep2+sp"),
    "etp1tp2sp": ("qwen3_moe", {"tp": 2, "sp": True}, 2, "etp1tp2sp"),
}


@pytest.mark.parametrize("name", RESOLVED)
def test_names_resolve_to_layouts(name: str) -> None:
    family, expected, ranks, title = RESOLVED[name]
    layout = resolve(name, model(family))
    assert (sizes(layout), layout.ranks, layout.title) == (expected, ranks, title)
    assert layout.parallel_layout().world_size == ranks
    for mixture in ("qwen3_moe", "deepseek_v3"):
        cut = resolve("tp2", model(mixture))
        assert (cut.sp, cut.etp, cut.title) == (True, 2, "tp2 (sp)")


REFUSED = {
    "tq2": ("qwen3", "not a layout"),
    "tp2++pp2": ("qwen3", "not a layout"),
    "tp2+tp4": ("qwen3", "each once"),
    "sp": ("qwen3", "needs tp of at least 2"),
    "pp1+vpp2": ("qwen3", "needs pp of at least 2"),
    "ep2": ("qwen3", "model_type=qwen3 has no experts"),
    "tp3": ("qwen3", "tp=3 does not divide num_attention_heads=4"),
    "pp3": ("qwen3", "pp\\*vpp=3\\*1=3 does not divide num_hidden_layers=4"),
    "tp2": ("gpt_oss", "does not cut experts that have biases"),
    "dp100": ("qwen3", "needs 100 ranks; at most 64"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_impossible_layouts_are_refused(name: str) -> None:
    """The layout is named, and why it is not possible."""
    family, reason = REFUSED[name]
    with pytest.raises(UserError, match=reason) as caught:
        resolve(name, model(family))
    assert name in str(caught.value)


def test_tolerances() -> None:
    assert tolerances("fp32", "") == FP32
    assert tolerances("bf16", "") == BF16
    assert tolerances("bf16", "", experts=True) == BF16_EXPERTS
    assert tolerances("fp32", "", experts=True) == FP32
    changed = tolerances("fp32", "gradient=1e-3, logprob=0")
    assert changed == {**FP32, "gradient": 1e-3, "logprob": 0.0}
    for given in ("gradients=1", "gradient", "gradient=x", "gradient=-1", "gradient=inf", "gradient=nan"):
        with pytest.raises(UserError, match="--tolerance"):
            tolerances("fp32", given)


@pytest.mark.parametrize("family", TINY)
def test_a_random_twin_is_a_whole_checkpoint(family: str, tmp_path: Path) -> None:
    """Of every family: each tensor that its config asks for, none besides, all finite; the same for a seed."""
    bare = bare_config(tmp_path / "bare", TINY[family])
    twin = write_random_twin(bare, tmp_path / "twin", multiple=4)
    assert twin.hf.num_layers == 4
    with CheckpointReader(tmp_path / "twin") as reader:
        _, actual = describe(Sharding(read_hf_config(tmp_path / "twin")), reader)
        assert not actual.problems
        again = dict(random_tensors(twin.hf))
        assert all(reader.read(name).equal(tensor) and tensor.isfinite().all() for name, tensor in again.items())
