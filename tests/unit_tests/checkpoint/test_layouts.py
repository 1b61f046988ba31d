"""A checkpoint goes from every layout to every other, bit for bit.

Eight layouts of a mixture of experts on four ranks, in pairs; and, in circles, other models, dtypes and implementations
of data parallelism. The state is compared under Hugging Face's names as the exporter gives it, weights and optimizer's
tensors alike, so an error that saving and loading have in common shows. Memory holds other numbers before a load.

`make test-full` and `make campaign-checkpoint` take all 56 pairs and all circles, `make test` some of them.
"""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from mega_rl.cli import app as cli
from tests.helpers.distributed import run_megatron_fsdp, run_ranks
from tests.helpers.models import write_tiny_checkpoint
from tests.helpers.selection import FULL, covering
from tests.unit_tests.checkpoint.layout_cases import (
    CIRCLES,
    LAYOUTS,
    STEPS,
    Case,
    checksums,
    role_of,
    run_circles,
    run_pairs,
)

pytestmark = pytest.mark.timeout(600)

PAIRS = covering(permutations(LAYOUTS, 2))
# Cases of the circles in `make test`.
FEW = {
    "tied": ("dp4", "uneven", "torch_fsdp2", "megatron_fsdp"),
    "value": ("dp4", "tp2-pp2"),
    "odd vocabulary": ("dp4", "tp2-pp2"),
}
CHOSEN = CIRCLES if FULL else {name: {each: CIRCLES[name][each] for each in few} for name, few in FEW.items()}
FAMILIES = {"routed": "qwen3_moe", "tied": "qwen3", "latent": "deepseek_v3", "sinks": "gpt_oss", "shared": "qwen2_moe"}
BF16 = ("bf16", "value")  # circles; a value head is FP32
HIDDEN = 32
NORM_TOLERANCE = 1e-5  # fp32 gradients of the same bits: sums are in another order


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("root")
    models = folder / "models"
    for name, family in FAMILIES.items():
        write_tiny_checkpoint(models / name, family=family, tied=name == "tied")
    write_tiny_checkpoint(models / "odd", family="qwen3", tied=False, vocab_size=51)  # padded under TP2
    return folder


@pytest.fixture(scope="module")
def layouts(root: Path) -> list[dict[str, Any]]:
    return run_ranks(4, run_pairs, str(root), PAIRS, timeout_s=280)


@pytest.fixture(scope="module")
def circles(root: Path) -> list[dict[str, Any]]:
    return run_megatron_fsdp(4, run_circles, str(root), CHOSEN, timeout_s=280)


@pytest.mark.parametrize("pair", [f"{source} -> {target}" for source, target in PAIRS])
def test_every_layout_loads_what_every_other_has_saved(layouts: list[dict[str, Any]], pair: str) -> None:
    check(layouts, pair)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_layout_goes_on_bit_for_bit(layouts: list[dict[str, Any]], layout: str) -> None:
    name = f"{layout} -> {layout}"
    check(layouts, name)
    for actual in layouts:
        assert actual[name]["norm"] == actual["saved"][layout]["norm"]
        assert actual[name]["same after"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_leaves_as_a_hugging_face_checkpoint(
    layouts: list[dict[str, Any]], root: Path, layout: str, tmp_path: Path
) -> None:
    """`mega-rl checkpoint export` gives every bit of what the engine's own exporter gave."""
    check_export(root / "layouts" / layout, LAYOUTS[layout], layouts[0]["saved"][layout]["held"], root, tmp_path)


@pytest.mark.parametrize("circle", CHOSEN)
def test_every_model_leaves_as_a_hugging_face_checkpoint(
    circles: list[dict[str, Any]], root: Path, circle: str, tmp_path: Path
) -> None:
    """Other families, dtypes and implementations of data parallelism; a critic by its role."""
    for name, case in CHOSEN[circle].items():
        held = circles[0][circle]["saved"][name]["held"]
        check_export(root / circle / name, case, held, root, tmp_path / name)


def check_export(folder: Path, case: Case, held: dict[str, str], root: Path, out: Path) -> None:
    options = ["--hf", str(root / "models" / case.model), "--role", role_of(case.head), "--overwrite"]
    options += ["--dtype", {"fp32": "float32", "bf16": "bfloat16"}[case.dtype]]
    assert cli.main(["checkpoint", "export", str(folder), str(out), *options]) == 0
    expected = {name: checksum for name, checksum in held.items() if name.startswith("weights ")}
    assert checksums("weights", load_file(out / "model.safetensors")) == expected
    assert (out / "config.json").exists()


@pytest.mark.parametrize("circle", CHOSEN)
def test_models_dtypes_and_implementations(circles: list[dict[str, Any]], circle: str) -> None:
    """Each case loads what the one before it has saved, and its next step has the gradients that it should."""
    ranks = [actual[circle] for actual in circles]
    names = [name for name in ranks[0] if name != "saved"]
    assert len(names) == len(CHOSEN[circle])
    for name in names:
        check(ranks, name)
        source, _, target = name.partition(" -> ")
        same = CHOSEN[circle][target].dtype == "bf16"
        for actual in ranks:
            expected = actual["saved"][target if same else source]["norm"]
            assert actual[name]["norm"] == pytest.approx(expected, rel=0.0 if same else NORM_TOLERANCE, abs=0.0), name


def check(ranks: list[dict[str, Any]], name: str) -> None:
    """On every rank everything is as it was saved, and every parameter has a counter of its own."""
    for rank, actual in enumerate(ranks):
        assert not actual[name]["wrong"], f"rank {rank}: {actual[name]['wrong'][:5]}"
        values, (states, distinct) = actual[name]["counters"]
        assert values in ([], [STEPS]), values
        assert states == distinct
    assert any(actual[name]["counters"][0] for actual in ranks)


def parameters(root: Path, model: str) -> int:
    """Numbers in the model's Hugging Face checkpoint."""
    with safe_open(root / "models" / model / "model.safetensors", "pt") as file:
        return sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_parameter_is_written_once(layouts: list[dict[str, Any]], root: Path, layout: str) -> None:
    """Weights and two moments of 4 bytes each, once over all ranks."""
    written = [actual["saved"][layout]["written"] for actual in layouts]
    assert sum(each["bytes"] for each in written) == 12 * parameters(root, "routed")
    assert {each["optimizer_steps"] for each in written} == {STEPS}
    shares = [4 * each["bytes"] / (12 * parameters(root, "routed")) for each in written]
    assert max(shares) < 1.05, shares  # a shard of each bucket, padded; norms are written by one tensor-parallel rank


@pytest.mark.parametrize(("circle", "case"), [(name, case) for name in BF16 for case in CHOSEN.get(name, {})])
def test_bytes_of_bf16(circles: list[dict[str, Any]], root: Path, circle: str, case: str) -> None:
    """A weight of 2 bytes, its main parameter and two moments of 4; of a value head all three have 4."""
    written = [actual[circle]["saved"][case]["written"]["bytes"] for actual in circles]
    head = 12 * HIDDEN if circle == "value" else 0
    assert sum(written) == 14 * parameters(root, "tied") + head


@pytest.mark.parametrize("case", CHOSEN["tied"])
def test_bytes_of_other_implementations(circles: list[dict[str, Any]], root: Path, case: str) -> None:
    """The same, once, however data parallelism is done and wherever a tied embedding has a copy."""
    written = [actual["tied"]["saved"][case]["written"]["bytes"] for actual in circles]
    assert sum(written) == 12 * parameters(root, "tied")
