"""`model.fp32_head` in bf16 models on both engines: log-probs and gradients against float64 of the same hidden states.

Tolerances: bf16 rounds logits of size 1 by up to 2^-8, 1e-3 on average; float32 logits and sums over 50 entries round
at some 1e-7. Weights' gradients are rounded to bf16 once for each of at most three micro-batches: by up to 2^-8 of an
element, by 2^-9 of a tensor's norm.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.helpers.distributed import run_ranks
from tests.helpers.engines import (
    LAYOUTS,
    exported_gradients,
    make_config,
    own_rows,
    replaced,
    running_engine,
    worst_difference,
)
from tests.helpers.models import random_experience, write_tiny_checkpoint
from tests.unit_tests.distributed.engine_cases import losses, whole

TEMPERATURE = 0.8


class Watch:
    """Compares the log-probs of each micro-batch with those of float64 logits, and adds up the weight's gradient."""

    def __init__(self, head: torch.nn.Module) -> None:
        self.dtypes: set[torch.dtype] = set()
        self.errors: list[Tensor] = []
        self.of_weight: Tensor | None = None
        self._head = head
        head.register_forward_hook(self._keep, with_kwargs=True)

    def _keep(self, module: Any, arguments: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        weight = named.get("weight")
        hidden = arguments[0]
        if getattr(module, "sequence_parallel", False):
            parts = [torch.empty_like(hidden) for _ in range(module.tp_group.size())]
            dist.all_gather(parts, hidden.detach().contiguous(), group=module.tp_group)
            hidden = torch.cat(parts)
        self._hidden = hidden.detach().double().flatten(0, 1)
        weight = (module.weight if weight is None else weight).detach()
        if isinstance(weight, DTensor):  # FSDP has taken the whole weight away already
            weight = weight.full_tensor().to(hidden.dtype)
        self._weight = weight.double()

    def logprobs(self, logits: Tensor, targets: Tensor, **named: Any) -> tuple[Tensor, Tensor | None]:
        """The engine's own log-probs and entropies."""
        from mega_rl.parallel.vocab import vocab_parallel_logprobs_entropy

        group, hidden = named["group"], self._hidden
        logprobs, entropy = vocab_parallel_logprobs_entropy(logits, targets, **named)
        exact = hidden @ self._weight.T
        if group is not None and group.size() > 1:
            shards = [torch.empty_like(exact) for _ in range(group.size())]
            dist.all_gather(shards, exact, group=group)
            exact = torch.cat(shards, dim=1)
        expected = (exact[:, : named["vocab_size"]] / named["temperature"]).log_softmax(-1)
        self.errors.append((logprobs.detach() - expected.gather(1, targets[:, None])[:, 0]).abs())
        self.dtypes.add(logits.dtype)
        if logits.requires_grad:
            logits.register_hook(lambda grad: self._add(grad.double().T @ hidden))
        return logprobs, entropy

    def _add(self, gradient: Tensor) -> None:
        self.of_weight = gradient if self.of_weight is None else self.of_weight + gradient


def run_case(checkpoint: str, *, layout: str, engine: str, gradient: bool = False, **model: Any) -> dict[str, Any]:
    """Log-probs, their errors and, `gradient`, that of an untied head beside the one in float64."""
    torch.manual_seed(0)
    config = make_config(Path(checkpoint), layout=layout, dtype="bf16", engine=engine)
    config = replaced(config, "model", **model)
    config = replaced(config, "engine.megatron.optimizer", distributed=False)
    config = replaced(config, "optim", clip_grad=0.0)
    config = replaced(config, "rollout", temperature=TEMPERATURE)
    with running_engine(config) as built:
        head = built.model.get_output_embeddings() if engine == "fsdp" else _output_layer(built)
        watch = None if head is None else Watch(head)
        rows = own_rows(random_experience(), built)
        with patch("mega_rl.engines.base.vocab_parallel_logprobs_entropy", watch and watch.logprobs):
            outputs = built.forward(rows, with_entropy=True)
            metrics = built.train_minibatch(rows, losses("lm"), lr=0.0)
        result = {"logprobs": whole(outputs.logprobs, built), "metrics": metrics}
        if engine == "megatron":
            result["gradients"] = exported_gradients(built)
        if watch is not None:
            result |= {"dtypes": watch.dtypes, "errors": torch.cat(watch.errors)}
            if gradient:
                result["head"] = (_gradient(built, head, engine), _expected(watch, built, engine))
        return result


def _output_layer(engine: Any) -> Any:
    (chunk,) = engine.models
    return chunk.output_layer if chunk.post_process else None


def _gradient(engine: Any, head: Any, kind: str) -> Tensor:
    """The gradient of an untied head's weight on this rank, whole over data parallelism."""
    if kind == "fsdp":
        for module in engine.model.modules():
            if hasattr(module, "reshard"):
                module.reshard()
        return head.weight.grad.full_tensor()
    return head.weight.main_grad.clone()


def _expected(watch: Watch, engine: Any, kind: str) -> Tensor:
    assert watch.of_weight is not None
    return engine.data_parallel.sum(watch.of_weight) if kind == "fsdp" else watch.of_weight


def run_cases(rank: int, world_size: int, cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Every case of this world size, by name."""
    results = {}
    for case in cases:
        case = dict(case)
        name = case.pop("name")
        assert LAYOUTS[case["layout"]][0] == world_size
        results[name] = run_case(**case)
    return results


pytestmark = pytest.mark.timeout(300)  # the first test pays for the launches of all

# name -> (engine, layout, tied embeddings)
CASES = {
    "1": ("megatron", "1", False),
    "1, tied": ("megatron", "1", True),
    "tp2": ("megatron", "tp2", False),
    "tp2-sp": ("megatron", "tp2-sp", False),
    "tp2-sp, tied": ("megatron", "tp2-sp", True),
    "cp2": ("megatron", "cp2", False),
    "pp2, tied": ("megatron", "pp2", True),
    "fsdp, tied": ("fsdp", "dp2", True),
    "fsdp": ("fsdp", "dp2", False),
}
WITH_GRADIENT = ("1", "tp2", "tp2-sp", "fsdp")  # no copies to sum over, or FSDP's own sum
Results = dict[str, list[dict[str, Any]]]  # by name: what each rank returned


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("models")
    paths = {tied: str(write_tiny_checkpoint(root / str(tied), tied=tied)) for tied in (True, False)}
    collected: Results = {}
    for world_size in (1, 2):
        cases = []
        for name, (engine, layout, tied) in CASES.items():
            case = {"name": name, "checkpoint": paths[tied], "layout": layout, "engine": engine}
            if LAYOUTS[layout][0] == world_size:
                cases.append({**case, "gradient": name in WITH_GRADIENT, "fp32_head": True})
                cases += [{**case, "name": f"{name}, bf16"}] * (name in ("1", "fsdp"))
        ranks = run_ranks(world_size, run_cases, world_size, cases, timeout_s=200)
        collected |= {case["name"]: [rank[case["name"]] for rank in ranks] for case in cases}
    return collected


def last(results: Results, name: str) -> dict[str, Any]:
    """What the last rank returned, which has the head in every layout."""
    return results[name][-1]


@pytest.mark.parametrize("name", CASES)
def test_log_probs_lose_nothing_to_rounded_logits(name: str, results: Results) -> None:
    exact = last(results, name)
    assert exact["dtypes"] == {torch.float32}
    assert exact["errors"].max() < 2e-6


@pytest.mark.parametrize("name", ["1", "fsdp"])
def test_bf16_logits_lose_a_thousand_times_as_much(name: str, results: Results) -> None:
    rounded, exact = last(results, f"{name}, bf16"), last(results, name)
    assert rounded["dtypes"] == {torch.bfloat16}
    assert rounded["errors"].mean() > 1000 * exact["errors"].mean()


@pytest.mark.parametrize("name", WITH_GRADIENT)
def test_the_gradient_of_the_head_is_that_of_its_logits(name: str, results: Results) -> None:
    """That of float64 products of the logits' gradient, on every rank's columns."""
    for rank in results[name]:
        gradient, expected = rank["head"]
        assert float((gradient.double() - expected).norm() / expected.norm()) < 2**-9


@pytest.mark.parametrize("name", ["tp2", "tp2-sp", "tp2-sp, tied", "cp2", "pp2, tied"])
def test_layouts_agree(name: str, results: Results) -> None:
    """As bf16 models do: layers round on both sides."""
    tied = CASES[name][2]
    one, many = last(results, "1, tied" if tied else "1"), results[name][0]
    assert (many["logprobs"] - one["logprobs"]).abs().mean() <= 0.02
    assert many["metrics"]["grad_norm"] == pytest.approx(one["metrics"]["grad_norm"], rel=0.05)
    distance, tensor = worst_difference(many["gradients"], one["gradients"])
    assert distance <= 0.2, tensor
