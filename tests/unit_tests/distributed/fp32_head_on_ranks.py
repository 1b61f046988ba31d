"""Errors of the head on each rank against float64 of its hidden states and weights, for test_fp32_head.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.helpers.engines import LAYOUTS, exported_gradients, make_config, own_rows, replaced, running_engine
from tests.helpers.models import random_experience
from tests.unit_tests.distributed.engine_cases import losses, whole

USERS = ("mega_rl.engines.megatron.schedule", "mega_rl.engines.fsdp.engine")
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
        with patch(f"{USERS[engine == 'fsdp']}.vocab_parallel_logprobs_entropy", watch and watch.logprobs):
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
