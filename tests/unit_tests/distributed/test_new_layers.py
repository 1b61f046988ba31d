"""Gated delta nets and sparse attention: Megatron-Core's numbers are transformers', packed, padded, on every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mega_rl.protocols import LossOutput
from tests.helpers.distributed import run_ranks
from tests.helpers.engines import exported_gradients, make_config, own_rows, replaced, running_engine, worst_difference
from tests.helpers.models import random_experience, write_tiny_checkpoint
from tests.helpers.selection import FULL, on_megatron
from tests.unit_tests.distributed.expert_cases import LAYOUTS, config_of, run_cases

pytestmark = [on_megatron("qwen3_next"), pytest.mark.timeout(900)]  # the first test pays for the launches of all

SPARSE = ("deepseek_v32", "glm_moe_dsa")
FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", *SPARSE)
# fp32, sums in another order. Measured against transformers: log-probs 3e-6, gradients 2e-5 of their norm (A_log, whose
# exponential multiplies it); packed against padded rows and layouts against one rank: 1e-6 and 4e-6.
LOGPROB_TOLERANCE, GRADIENT_TOLERANCE = 2e-5, 1e-4
LAYOUT_LOGPROBS, LAYOUT_GRADIENTS, NORM_TOLERANCE = 1e-5, 3e-5, 5e-6
PLAN = {
    "tp2-sp": FAMILIES,
    "pp2": FAMILIES,
    "dp2": ("qwen3_5_text", "qwen3_next", *SPARSE),
    "ep2": ("qwen3_next", "qwen3_5_moe_text", *SPARSE),
    "ep2-pp2": ("qwen3_5_moe_text",),
    "cp2": ("qwen3_5_text",),
    "cp2-ep2": ("qwen3_next", "qwen3_5_moe_text"),
    "tp2-sp-ep2-dp2": ("qwen3_next", "glm_moe_dsa"),
}
CASES = {f"{layout} {family}": (layout, family) for layout, families in PLAN.items() for family in families}
if not FULL:
    CASES = {name: CASES[name] for name in ("tp2-sp qwen3_next", "tp2-sp qwen3_5_text", "pp2 qwen3_next",
                                            "dp2 qwen3_5_text", "ep2 qwen3_5_moe_text", "tp2-sp glm_moe_dsa",
                                            "pp2 deepseek_v32", "dp2 glm_moe_dsa", "ep2 deepseek_v32",
                                            "cp2 qwen3_5_text", "cp2-ep2 qwen3_next")}  # fmt: skip


class Weighted:
    """The sum of weighted log-probs, whose gradient transformers gives without our code."""

    needs_entropy = False

    def __call__(self, outputs: Any, fields: Any, sequences: Any) -> LossOutput:
        return LossOutput(-(outputs.logprobs * fields["advantages"]).sum(), {})


def of_transformers(path: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs and gradients of transformers' class, each row without padding."""
    from transformers import AutoModelForCausalLM
    from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

    if hasattr(glm, "apply_rotary_pos_emb"):  # the fault of transformers before 5.13
        monkeypatch.setattr(glm, "apply_rotary_pos_emb", glm.apply_rotary_pos_emb_interleave)
    batch = random_experience()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
    logprobs = torch.zeros(batch.tokens.shape)
    for row, length in enumerate(batch.lengths.tolist()):
        tokens = batch.tokens[row : row + 1, :length]
        made = model(tokens).logits.log_softmax(-1)[0, :-1].gather(1, tokens[0, 1:, None])[:, 0]
        logprobs[row, 1:length] = made.detach() * batch.loss_mask[row, 1:length]
        (-(made * batch.advantages[row, 1:length]).sum()).backward()  # type: ignore[no-untyped-call]
    trained = {name: parameter.grad for name, parameter in model.named_parameters() if ".indexer." not in name}
    assert all(parameter.grad is None for name, parameter in model.named_parameters() if name not in trained)
    return logprobs, trained


def of_engine(rank: int, paths: dict[str, str]) -> dict[str, tuple[Tensor, dict[str, Tensor], float]]:
    """Log-probs and gradients of the Megatron engine, and how many micro-batches it made, packed and padded."""
    actual = {}
    for family, path in paths.items():
        for packing in (True, False):
            config = replaced(make_config(Path(path)), "engine.megatron.optimizer", distributed=False)
            config = replaced(config, "optim", clip_grad=0.0)
            config = replaced(config, "trainer.microbatch", packing=packing, size=3, max_tokens=64)
            with running_engine(config) as engine:
                batch = random_experience()
                logprobs = engine.forward(batch).logprobs
                metrics = engine.train_minibatch(batch, Weighted(), lr=0.0)
                kind = "packed" if packing else "padded"
                actual[f"{kind} {family}"] = logprobs, exported_gradients(engine), metrics["num_microbatches"]
    return actual


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("delta")
    return {family: str(write_tiny_checkpoint(root / family, family=family, tied=False)) for family in FAMILIES}


@pytest.fixture(scope="module")
def alone(paths: dict[str, str]) -> dict[str, Any]:
    """What one rank found, by kind and family."""
    answers: dict[str, Any] = run_ranks(1, of_engine, paths, timeout_s=300)[0]
    return answers


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_and_padded_rows_equal_transformers(
    family: str, paths: dict[str, str], alone: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probs and the gradient of every tensor; a state that passes from row to row would move them by far more."""
    expected, gradients = of_transformers(paths[family], monkeypatch)
    for kind, count in (("packed", 2), ("padded", 3)):
        logprobs, actual, number = alone[f"{kind} {family}"]
        assert number == count
        actual = {name: gradient for name, gradient in actual.items() if not name.endswith("correction_bias")}
        assert (logprobs - expected).abs().max() <= LOGPROB_TOLERANCE
        split = {name: gradients[name] for name in actual if name in gradients} | _experts(gradients)
        distance, worst = worst_difference(actual, split)
        assert distance <= GRADIENT_TOLERANCE, worst
    assert min(float(gradient.norm()) for gradient in split.values()) > 0.0


def _experts(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of every expert under its own name, of tensors that hold all experts of a layer."""
    split = {}
    for name, whole in gradients.items():
        if name.endswith("experts.gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            for expert, (gate, up) in enumerate(part.chunk(2) for part in whole):
                split |= {f"{prefix}{expert}.gate_proj.weight": gate, f"{prefix}{expert}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            prefix = name.removesuffix("down_proj")
            split |= {f"{prefix}{expert}.down_proj.weight": part for expert, part in enumerate(whole)}
    return split


@pytest.fixture(scope="module")
def results(paths: dict[str, str]) -> dict[str, Any]:
    """What rank 0 found, by case; one launch for each number of ranks."""
    families = {family for _, family in CASES.values()}
    cases = {f"1 {family}": ("1", family) for family in sorted(families)} | CASES
    answers: dict[str, Any] = {}
    for world_size in sorted({LAYOUTS[layout][0] for layout, _ in cases.values()}):
        of_size = {
            name: {"checkpoint": paths[family], "layout": layout}
            for name, (layout, family) in cases.items()
            if LAYOUTS[layout][0] == world_size
        }
        answers |= run_ranks(world_size, run_cases, of_size, timeout_s=300)[0]
    return answers


@pytest.mark.parametrize("name", list(CASES))
def test_layout_computes_what_one_rank_computes(results: dict[str, Any], name: str) -> None:
    """Log-probs, every clipped gradient and the norm before clipping, of packed rows."""
    one, many = results[f"1 {CASES[name][1]}"], results[name]
    assert (many["logprobs"] - one["logprobs"]).abs().max() <= LAYOUT_LOGPROBS
    assert many["metrics"]["grad_norm"] == pytest.approx(one["metrics"]["grad_norm"], rel=NORM_TOLERANCE)
    distance, worst = worst_difference(many["gradients"], one["gradients"])
    assert distance <= LAYOUT_GRADIENTS, worst


def replay(rank: int, path: str, cases: list[tuple[str, bool, str]]) -> list[dict[str, Any]]:
    """What indexers chose, and what comes of it when they would choose otherwise, with and without replay."""
    actual = []
    for layout, packing, recompute in cases:
        config = config_of(Path(path), layout, routing_replay=True)
        config = replaced(config, "trainer.microbatch", packing=packing, size=2)
        with running_engine(replaced(config, "model", recompute=recompute)) as engine:
            rows = own_rows(random_experience(), engine)
            outputs = {"before": engine.forward(rows)}
            recorded = rows.clone()
            recorded.routing = outputs["before"].routing
            engine.train_minibatch(rows, Weighted(), lr=0.0)
            gradients = {"before": exported_gradients(engine)}
            for model in engine.models:
                for name, parameter in model.named_parameters():
                    if "indexer.linear_wq_b" in name:
                        parameter.data.neg_()
            for name, batch in (("free", rows), ("again", recorded)):
                outputs[name] = engine.forward(batch)
                engine.train_minibatch(batch, Weighted(), lr=0.0)
                gradients[name] = exported_gradients(engine)
            actual.append({"outputs": outputs, "gradients": gradients})
    return actual


def test_choices_of_indexers_are_replayed(paths: dict[str, str]) -> None:
    """Experts and chosen tokens alike: any layout records the same, and replays them in updates and recomputation."""
    one: list[tuple[str, bool, str]] = [("1", True, "none"), ("1", False, "full")]
    two = [("tp2-sp", True, "full"), ("pp2", False, "none")]
    cases = [*run_ranks(1, replay, paths["deepseek_v32"], one, timeout_s=300)[0]]
    cases += run_ranks(2, replay, paths["deepseek_v32"], two, timeout_s=300)[0]
    first = cases[0]["outputs"]["before"]
    assert first.routing.shape[2:] == (3 + 4 * 2, 4)  # three mixtures, then six tokens in two rows of each layer
    assert (in_order(first) <= torch.arange(first.routing.size(1))[:, None, None]).all()  # positions in each sequence
    for case in cases:
        before, free, again = (case["outputs"][name] for name in ("before", "free", "again"))
        assert torch.equal(again.routing, before.routing)
        assert torch.equal(in_order(before), in_order(first))
        assert not torch.equal(in_order(free), in_order(first))
        assert (again.logprobs - first.logprobs).abs().max() <= LAYOUT_LOGPROBS
        assert (free.logprobs - first.logprobs).abs().max() > 100 * LAYOUT_LOGPROBS
        ways = case["gradients"]
        free_way, again_way = (worst_difference(ways[name], ways["before"])[0] for name in ("free", "again"))
        assert again_way <= LAYOUT_GRADIENTS
        assert free_way > 100 * LAYOUT_GRADIENTS


def in_order(outputs: Any) -> Tensor:
    """The tokens that every indexer chose, whose order depends on the rounding of scores."""
    chosen: Tensor = outputs.routing[:, :, 3:].unflatten(2, (4, 2)).flatten(3).sort(-1).values
    return chosen
