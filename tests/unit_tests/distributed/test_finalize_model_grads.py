"""After a backward, gradients of weights that ranks share are added up, each over its own group and no other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_ranks
from tests.helpers.engines import make_config, replaced, running_engine
from tests.helpers.models import write_tiny_checkpoint

# name -> (checkpoint, layout, head, frozen patterns)
CASES: dict[str, tuple[str, str, str, list[str]]] = {
    "tp2-sp": ("untied", "tp2-sp", "lm", []),
    "tp2": ("untied", "tp2", "lm", []),
    "tp2-sp value": ("untied", "tp2-sp", "value", []),
    "tp2 value": ("untied", "tp2", "value", []),
    "tp2-sp frozen norms": ("untied", "tp2-sp", "lm", ["*layernorm.weight"]),
    "dp2": ("tied", "dp2", "lm", []),
    "pp2 tied": ("tied", "pp2", "lm", []),
    "pp2 untied": ("untied", "pp2", "lm", []),
    "pp2 tied, two chunks": ("tied", "pp2-vpp2", "lm", []),
    "pp2 tied, embedding frozen": ("tied", "pp2", "lm", ["embedding.*"]),
    "pp2 tied, all frozen": ("tied", "pp2", "lm", ["*"]),
    "pp2 value": ("tied", "pp2", "value", []),
}
PARALLEL: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp2-sp": {"tp": 2, "sequence_parallel": True},
    "dp2": {},
    "pp2": {"pp": 2},
    "pp2-vpp2": {"pp": 2, "vpp": 2},
    "pp4-vpp2": {"pp": 4, "vpp": 2},
}
ROUTERS = ("dp2", "tp2-sp", "pp2")
BIAS_RATE = 0.25


@contextmanager
def wrapped_engine(
    checkpoint: Path,
    layout: str,
    *,
    head: str = "lm",
    frozen: list[str] | None = None,
    prepare: Callable[[Any], None] | None = None,
) -> Iterator[Any]:
    """An engine whose chunks are in DDP, without an optimizer: a model that is frozen as a whole has none."""
    config = replaced(make_config(checkpoint), "engine.megatron.optimizer", distributed=False)
    config = replaced(config, "engine.megatron", **PARALLEL[layout])
    with running_engine(config, head=head, trainable=False) as engine:
        from mega_rl.ddp.access import freeze, named_parameters
        from mega_rl.ddp.wrap import wrap_chunks

        if prepare is not None:
            prepare(engine)
        if frozen == ["*"]:  # no run may freeze all of a model, but a reward model may be wrapped as it is
            for model in engine.models:
                model.requires_grad_(False)
        else:
            freeze(named_parameters(engine.chunks), frozen or [], everyone=engine.replica)
        engine.chunks = wrap_chunks(
            engine.chunks,
            config=engine.config,
            ddp=config.engine.megatron.ddp,
            distributed_optimizer=False,
            collection=engine.groups.collection,
        )
        yield engine


def fill_and_finalize(engine: Any, *, rank: int) -> dict[str, dict[str, Any]]:
    """By chunk and name: the sum of rank r's gradients (r + 1) * ones, and the marks of the parameter.

    The token count handed over must divide nothing.
    """
    for chunk in engine.chunks:
        chunk.zero_grad_buffer()
        for parameter in chunk.module.parameters():
            if parameter.requires_grad:
                parameter.main_grad.fill_(rank + 1)
    tokens = torch.tensor(7, dtype=torch.int, device=engine.device)
    engine.config.finalize_model_grads_func(list(engine.chunks), tokens, pg_collection=engine.groups.collection)
    actual = {}
    for stage, chunk in enumerate(engine.chunks):
        for name, parameter in chunk.module.named_parameters():
            has_gradient = hasattr(parameter, "main_grad")
            assert has_gradient == parameter.requires_grad, name
            assert not has_gradient or parameter.main_grad.unique().numel() == 1, name
            actual[f"{stage}.{name}"] = {
                "gradient": float(parameter.main_grad.flatten()[0]) if has_gradient else None,
                "sequence_parallel": bool(getattr(parameter, "sequence_parallel", False)),
            }
    return actual


def finalize_all(rank: int, root: str) -> dict[str, Any]:
    """Every case on two ranks."""
    actual: dict[str, Any] = {}
    for name, (checkpoint, layout, head, frozen) in CASES.items():
        with wrapped_engine(Path(root) / checkpoint, layout, head=head, frozen=frozen) as engine:
            actual[name] = fill_and_finalize(engine, rank=rank)
    for layout in ROUTERS:
        for rate in (0.0, BIAS_RATE):
            with wrapped_engine(Path(root) / "routed", layout) as engine:
                actual[f"{layout} bias {rate}"] = update_biases(engine, rank=rank, rate=rate)
    return actual


def update_biases(engine: Any, *, rank: int, rate: float) -> dict[str, Any]:
    """The routers' biases before and after, with this rank's counts of tokens per expert, one list for each router."""
    engine.config.moe_router_bias_update_rate = rate
    routers = [m for chunk in engine.models for m in chunk.modules() if hasattr(m, "expert_bias")]
    before = [router.expert_bias.tolist() for router in routers]
    counts = []
    for number, router in enumerate(routers):
        generator = torch.Generator().manual_seed(10 * rank + number)
        counted = torch.randint(0, 9, router.local_tokens_per_expert.shape, generator=generator).float()
        router.local_tokens_per_expert.copy_(counted)
        counts.append(counted.tolist())
    fill_and_finalize(engine, rank=rank)
    return {
        "before": before,
        "counts": counts,
        "after": [router.expert_bias.tolist() for router in routers],
        "left": [float(router.local_tokens_per_expert.abs().sum()) for router in routers],
    }


def embedders(rank: int, checkpoint: str, *, declared: bool) -> list[dict[str, float | None]]:
    """Gradients of each chunk's parameters after finalisation on PP4 x VPP2, with embedders in every chunk.

    `declared`: whether the config says that there are such embedders. Chunk c of rank r fills its gradients with
    10 ** c * (r + 1).
    """

    def add(engine: Any) -> None:
        engine.config.has_cond_embedder = declared
        for chunk in engine.models:
            chunk.shared_embedder = torch.nn.Linear(3, 2, device=engine.device)
            chunk.own_embedder = torch.nn.Linear(3, 2, device=engine.device)
            chunk.frozen_embedder = torch.nn.Linear(3, 2, device=engine.device).requires_grad_(False)
            for module in (chunk.shared_embedder, chunk.frozen_embedder):
                for parameter in module.parameters():
                    parameter.pipeline_parallel = True

    with wrapped_engine(Path(checkpoint), "pp4-vpp2", prepare=add) as engine:
        for stage, chunk in enumerate(engine.chunks):
            chunk.zero_grad_buffer()
            for parameter in chunk.module.parameters():
                if parameter.requires_grad:
                    parameter.main_grad.fill_(10**stage * (rank + 1))
        engine.config.finalize_model_grads_func(list(engine.chunks), None, pg_collection=engine.groups.collection)
        return [
            {name: _one_value(parameter) for name, parameter in chunk.module.named_parameters()}
            for chunk in engine.chunks
        ]


def _one_value(parameter: torch.nn.Parameter) -> float | None:
    """The number that all elements of the gradient are; None without a gradient."""
    if not parameter.requires_grad:
        return None
    (value,) = parameter.main_grad.unique().tolist()
    return float(value)


def embed_all(rank: int, checkpoint: str) -> dict[str, Any]:
    """With and without embedders declared."""
    return {str(declared): embedders(rank, checkpoint, declared=declared) for declared in (True, False)}


pytestmark = pytest.mark.timeout(300)  # the first test pays for the launch

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
SUM = 3.0  # of rank 0's gradient of ones and rank 1's of twos


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both ranks found."""
    root: Path = tmp_path_factory.mktemp("models")
    write_tiny_checkpoint(root / "tied", family="qwen3", tied=True)
    write_tiny_checkpoint(root / "untied", family="qwen3", tied=False)
    write_tiny_checkpoint(root / "routed", family="deepseek_v3", tied=False)
    return run_ranks(2, finalize_all, str(root), timeout_s=180)


def gradients(actual: dict[str, dict[str, Any]]) -> dict[str, float | None]:
    """By chunk and name."""
    return {name: value["gradient"] for name, value in actual.items()}


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("tp2")])
def test_layer_norms_across_tensor_parallelism(ranks: list[dict[str, Any]], case: str) -> None:
    """Under sequence parallelism every norm is summed, without it those of queries and keys; no matrix ever is."""
    sequence_parallel = "sp" in case
    for rank, actual in enumerate(gradients(rank[case]) for rank in ranks):
        norms = {name for name in actual if "layernorm" in name}
        assert len(norms) == 4 * 4 + 1  # two of each layer and those of its queries and keys, and the final one
        for name, gradient in actual.items():
            if "frozen" in case and name in norms and name.endswith("layernorm.weight"):
                assert gradient is None, name
                continue
            shared = name in norms and (sequence_parallel or "q_layernorm" in name or "k_layernorm" in name)
            if name.endswith(OUTPUT) and "value" in case:
                shared = sequence_parallel  # the critic's head: each rank sees its slice of the tokens
            assert gradient == (SUM if shared else rank + 1), name


def test_marks_of_sequence_parallelism(ranks: list[dict[str, Any]]) -> None:
    """What is summed is what is marked, so that a norm added later is not forgotten."""
    for case, actual in ((case, rank[case]) for case in ("tp2-sp", "tp2-sp value") for rank in ranks):
        for name, value in actual.items():
            assert (value["gradient"] == SUM) == value["sequence_parallel"], (case, name)


def test_data_parallel_sums_are_not_divided(ranks: list[dict[str, Any]]) -> None:
    """Neither by the number of ranks nor by the count of tokens that the schedule hands over."""
    for actual in (gradients(rank["dp2"]) for rank in ranks):
        assert set(actual.values()) == {SUM}


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("pp2")])
def test_word_embeddings_across_the_pipeline(ranks: list[dict[str, Any]], case: str) -> None:
    """Tied: the first stage's embedding and the last one's output layer hold one sum; all else stays."""
    tied = "untied" not in case and "value" not in case
    for rank, actual in enumerate(gradients(rank[case]) for rank in ranks):
        last_chunk = "1" if "chunks" in case else "0"
        ends = {f"0.{EMBEDDING}"} if rank == 0 else {f"{last_chunk}.{OUTPUT}"}
        assert ends <= actual.keys()
        assert len(actual) > 15
        for name, gradient in actual.items():
            frozen = "all frozen" in case or ("embedding frozen" in case and name in ends)
            expected = None if frozen else SUM if tied and name in ends else rank + 1
            assert gradient == expected, name


@pytest.mark.parametrize("layout", ROUTERS)
def test_expert_biases_move_against_the_load(ranks: list[dict[str, Any]], layout: str) -> None:
    """By the rate times the sign of (mean - load), loads over all ranks that saw tokens of the layer; then forgotten.

    In a pipeline every stage counts for its own layers.
    """
    actual = [rank[f"{layout} bias {BIAS_RATE}"] for rank in ranks]
    for rank in actual:
        assert len(rank["before"]) == (3 if layout != "pp2" else len(rank["before"]))
        for number, (before, after) in enumerate(zip(rank["before"], rank["after"], strict=True)):
            parts = [rank] if layout == "pp2" else actual
            load = [sum(counts) for counts in zip(*(part["counts"][number] for part in parts), strict=True)]
            mean = sum(load) / len(load)
            expected = [
                bias + BIAS_RATE * ((mean > tokens) - (mean < tokens))
                for bias, tokens in zip(before, load, strict=True)
            ]
            assert after == pytest.approx(expected, abs=1e-6)
            assert any(not math.isclose(a, b) for a, b in zip(before, after, strict=True))
        assert not any(rank["left"])


@pytest.mark.parametrize("layout", ROUTERS)
def test_expert_biases_stay_at_rate_zero(ranks: list[dict[str, Any]], layout: str) -> None:
    """Bit for bit: reinforcement learning trains on the routing it loaded."""
    for rank in ranks:
        actual = rank[f"{layout} bias 0.0"]
        assert actual["after"] == actual["before"]
        assert not any(actual["left"])
