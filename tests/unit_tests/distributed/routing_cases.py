"""Recording and replaying the experts of every token, on one layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mega_rl.types import Experience
from tests.helpers.engines import exported_gradients, own_rows, replaced, running_engine
from tests.helpers.models import random_experience
from tests.unit_tests.distributed.engine_cases import losses
from tests.unit_tests.distributed.expert_cases import config_of


def with_routing(batch: Experience, routing: torch.Tensor | None) -> Experience:
    """The batch with this routing."""
    batch = batch.clone()
    batch.routing = routing
    return batch


def all_rows(routing: torch.Tensor, engine: Any) -> torch.Tensor:
    """[B, S, L, K] of all data-parallel ranks' rows of `own_rows`, in order."""
    ranks = engine.data_parallel
    count = int(ranks.sum(torch.tensor(routing.size(0))))
    full = torch.zeros(count, *routing.shape[1:], dtype=torch.int32)
    full[count * ranks.rank // ranks.size : count * (ranks.rank + 1) // ranks.size] = routing
    return ranks.sum(full)


def perturb_routers(engine: Any) -> None:
    """Other routers, the same on every layout."""
    from mega_rl.engines.models.moe import Router

    for model in engine.models:
        for module in model.modules():
            if isinstance(module, Router):
                noise = torch.Generator().manual_seed(module.layer_number)
                with torch.no_grad():
                    module.weight.add_(torch.randn(module.weight.shape, generator=noise).to(module.weight))
    engine.optimizer.reload_model_params()


def run_case(
    checkpoint: str, layout: str, *, padded: bool = False, recompute: str = "none", modules: tuple[str, ...] = ()
) -> dict[str, Any]:
    """What is recorded before and after the routers change, with and without replay, and what training makes of it."""
    config = config_of(Path(checkpoint), layout, routing_replay=True)
    config = replaced(config, "trainer.microbatch", packing=not padded, size=2)
    config = replaced(config, "model", recompute=recompute, recompute_modules=list(modules or ("core_attn",)))
    result: dict[str, Any] = {}
    with running_engine(config) as engine:
        rows = own_rows(random_experience(), engine)
        before = engine.forward(rows)
        result["routing"] = all_rows(before.routing, engine)
        result["dtype"] = str(before.routing.dtype)
        for name, routing in (("free", None), ("replayed", before.routing)):
            metrics = engine.train_minibatch(with_routing(rows, routing), losses("lm"), lr=0.0)
            result[name] = {"gradients": exported_gradients(engine), "norm": metrics["grad_norm"]}
        perturb_routers(engine)
        result["moved"] = all_rows(engine.forward(rows).routing, engine)
        again = engine.forward(with_routing(rows, before.routing))
        result["again"] = all_rows(again.routing, engine)
        half = before.routing.clone()
        half[:, ::2] = -1
        result["half"] = all_rows(engine.forward(with_routing(rows, half)).routing, engine)
        for name, routing in (("moved free", None), ("moved replayed", before.routing)):
            metrics = engine.train_minibatch(with_routing(rows, routing), losses("lm"), lr=0.0)
            result[name] = {"loads": engine.routing.loads.clone(), "gradients": exported_gradients(engine)}
    return result


def refusals(checkpoint: str) -> list[str]:
    """What an engine says of a routing that cannot be of its model."""
    said = []
    with running_engine(config_of(Path(checkpoint), "1", routing_replay=True)) as engine:
        rows = random_experience()
        routing = engine.forward(rows).routing
        for wrong in (routing[..., :1], routing[:, :, :1], torch.full_like(routing, 99)):
            try:
                engine.forward(with_routing(rows, wrong))
                said.append("nothing")
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
    return said


def unused(checkpoint: str) -> bool:
    """Whether an engine without replay records nothing, and takes no notice of a batch's routing."""
    with running_engine(config_of(Path(checkpoint), "1")) as engine:
        rows = random_experience()
        plain = engine.forward(rows)
        with_experts = engine.forward(with_routing(rows, torch.zeros(8, 24, 2, 2, dtype=torch.int16)))
        return (
            plain.routing is None
            and with_experts.routing is None
            and torch.equal(plain.logprobs, with_experts.logprobs)
        )


def travelling(size: int) -> list[int]:
    """The routing's first expert of rows exchanged over all ranks: it must travel with its row."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    from mega_rl.parallel import groups as process_groups
    from mega_rl.parallel.comm import GroupRanks
    from mega_rl.parallel.layout import ParallelLayout

    groups = process_groups.initialize(ParallelLayout(world_size=size), accelerator=accelerator, timeout_s=60.0)
    try:
        ranks = GroupRanks(groups.world)
        rows = random_experience()
        marks = 1000 * ranks.rank + torch.arange(8, dtype=torch.int16)
        rows.routing = marks[:, None, None, None].expand(8, 24, 3, 2).clone()
        received = ranks.exchange_rows(rows, torch.arange(8) % size)
        assert received.routing.dtype == torch.int16
        assert (received.routing == received.routing[:, :1, :1, :1]).all()
        return [int(mark) for mark in ranks.gather_rows(received).routing[:, 0, 0, 0]]
    finally:
        process_groups.destroy()


def run_cases(rank: int, size: int, cases: dict[str, dict[str, Any]], extras: str) -> dict[str, Any] | None:
    """Every case, and what is asked of one number of ranks alone."""
    actual: dict[str, Any] = {}
    for name, case in cases.items():
        try:
            actual[name] = run_case(**case)
        except Exception as error:
            raise RuntimeError(f"case {name}") from error
    if size == 1:
        actual["refusals"], actual["unused"] = refusals(extras), unused(extras)
    else:
        actual[f"travelling {size}"] = travelling(size)
    return actual if rank == 0 else None


def real_tokens() -> torch.Tensor:
    """[B, S] bool, the tokens of `random_experience`."""
    batch = random_experience()
    return torch.arange(batch.tokens.size(1)) < batch.lengths[:, None]


def loads_of(routing: torch.Tensor, experts: int) -> torch.Tensor:
    """[L, experts] float64, how many real tokens a recorded routing [B, S, L, K] sends to each expert."""
    chosen = routing[real_tokens()].long()  # [n, L, K]
    counts = [chosen[:, layer].flatten().bincount(minlength=experts) for layer in range(chosen.size(1))]
    return torch.stack(counts).double()


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are not bit-equal."""
    assert left.keys() == right.keys()
    return [name for name in left if not torch.equal(left[name], right[name])]
