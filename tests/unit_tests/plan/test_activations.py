"""Formula of activations against what autograd keeps in live engines, and the known sizes of real models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mega_rl.converters.architecture import HFConfig, is_delta_net, is_moe
from mega_rl.converters.hf.config import read_hf_config
from mega_rl.converters.plan.sharding import Spec
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.plan.activations import LayerShape, Recompute, kept
from tests.helpers.models import write_tiny_checkpoint
from tests.unit_tests.plan.activations_on_ranks import CASES, run_cases
from tests.unit_tests.plan.models import QWEN3_8B, run_live

pytestmark = pytest.mark.timeout(300)  # the first test pays for both launches
SIZES = {"hidden_size": 64, "intermediate_size": 320, "num_attention_heads": 8, "num_hidden_layers": 2}
GQA = {"num_key_value_heads": 2, "head_dim": 16}
TOKENS = 16384
# Bytes per token outside the layers: ids, targets, sums of log-probs, places in length classes.
OTHERS = 40
PLACES = 8  # of these, which layers that run again make again
TOLERANCE = 0.02


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints whose sizes are all different."""
    root = tmp_path_factory.mktemp("models")
    more = {
        "deepseek_v3": {"num_key_value_heads": 8},
        "qwen3_5_text": {**GQA, "layer_types": ["linear_attention", "full_attention"], "full_attention_interval": 2},
        "gemma3_text": {**GQA, "sliding_window": None, "layer_types": ["full_attention"] * 2},
    }
    return {
        family: write_tiny_checkpoint(root / family, family=family, tied=False, **{**SIZES, **more.get(family, GQA)})
        for family in {family for _, family, _ in CASES.values()}
    }


@pytest.fixture(scope="module")
def live(checkpoints: dict[str, Path]) -> dict[str, dict[str, float]]:
    """Every case as rank 0 measured it."""
    return {name: ranks[0] for name, ranks in run_live(CASES, checkpoints, run_cases).items()}


@pytest.mark.parametrize("name", CASES)
def test_formula_equals_what_autograd_keeps(
    name: str, live: dict[str, dict[str, float]], checkpoints: dict[str, Path]
) -> None:
    """All layers and the head, local layers, with the kernels of a GPU in place of a CPU's."""
    _, family, case = CASES[name]
    hf = read_hf_config(checkpoints[family])
    tokens, planned, others = live[name]["tokens"], sum(per_token(hf, layout_of(case), case)), OTHERS
    if case.get("recompute") == "full":
        planned += 4 * hf.head_dim  # angles of packed tokens, once for all layers
        others -= PLACES
    assert tokens * planned == pytest.approx(live[name]["bytes"] - others * tokens, rel=TOLERANCE)


def layout_of(case: dict[str, Any]) -> ParallelLayout:
    """The layout of a case, of as few ranks as it takes; experts are cut as the rest is."""
    sizes = case.get("layout", {})
    return ParallelLayout(world_size=sizes.get("tp", 1) * sizes.get("cp", 1), **{"etp": sizes.get("tp", 1), **sizes})


def per_token(hf: HFConfig, layout: ParallelLayout, case: dict[str, Any], *, spec: Spec = "local") -> list[float]:
    """Bytes per token of every layer, and of final norm, head and logits."""
    b = 4 if case.get("dtype") == "fp32" else 2
    recompute = Recompute(case.get("recompute", "none"), case.get("recompute_modules", ["core_attn"]))
    shape = LayerShape(hf, layout, spec, "packed" if spec == "te" else "classes", itemsize=b)
    shapes = [replace(shape, moe=is_moe(hf, i), delta=is_delta_net(hf, i)) for i in range(hf.num_layers)]
    layers = [sum(kept(each, recompute).values()) for each in shapes]
    final = hf.hidden_size * (4 if hf.zero_centered_norm else b) * shape.share + hf.hidden_size * b * shape.share
    return [*layers, final, hf.vocab_size / layout.tp * b]


def test_sizes_of_a_real_layer() -> None:
    """Counted on a simulated device: 2.64 GB of 8B. Recomputation and parallelism keep less, norms stay whole."""
    one = ParallelLayout()

    def size(layout: ParallelLayout = one, recompute: Recompute = Recompute(), spec: Spec = "local") -> float:  # noqa: B008
        shape = LayerShape(QWEN3_8B, layout, spec, "packed" if spec == "te" else "classes")
        return TOKENS * sum(kept(shape, recompute).values())

    assert round((size() + 2 * QWEN3_8B.hidden_size * 2 * TOKENS / 4) / 1e9, 2) == 2.64
    modes = [Recompute(), Recompute("selective"), Recompute("selective", ("core_attn", "mlp")), Recompute("full")]
    sizes = [size(recompute=mode) for mode in modes]
    assert sizes == sorted(set(sizes), reverse=True)
    tp, sp = (size(ParallelLayout(world_size=4, tp=4, sequence_parallel=cut)) for cut in (False, True))
    assert size() / 4 < sp < tp < size()
    assert size(spec="te") < size()


def test_padding_counts_only_inside_attention() -> None:
    shape = LayerShape(QWEN3_8B, ParallelLayout())
    padded, plain = kept(replace(shape, padding=2.0), Recompute()), kept(shape, Recompute())
    assert {name for name in plain if padded[name] != plain[name]} == {"keys and queries", "softmax"}
