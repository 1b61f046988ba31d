"""Limits of a probe: a healthy server passes, one with a wrong weight does not.

The network is small and has logits as large as a trained model's.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from mega_rl.parallel.comm import SingleRank
from mega_rl.rollout.sglang.weights.checks import LIMITS, Probe
from mega_rl.types import Rollout, TokenOutputs

TOKENS = 8
BF16, FP32 = LIMITS["bfloat16"], LIMITS["float32"]
VOCAB, HIDDEN, LAYERS = 512, 64, 4
PROJECTIONS = ("q", "k", "v", "o", "up", "down")


# -- faults ------------------------------------------------------------------------------------------------------------


def make_weights(seed: int) -> dict[str, Tensor]:
    """A causal network whose logits reach 20 and more, as a trained model's do."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(rows, columns, generator=generator) / columns**0.5

    shapes = {"up": (4 * HIDDEN, HIDDEN), "down": (HIDDEN, 4 * HIDDEN)}
    weights = {
        f"{layer}.{name}": matrix(*shapes.get(name, (HIDDEN, HIDDEN)))
        for layer in range(LAYERS)
        for name in PROJECTIONS
    }
    return weights | {"embedding": matrix(VOCAB, HIDDEN, HIDDEN**0.5), "head": matrix(VOCAB, HIDDEN, 6.0)}


def logits_of(weights: dict[str, Tensor], tokens: Tensor, dtype: torch.dtype, *, order: int = 1) -> Tensor:
    """[B, S, V] in `dtype` of tokens [B, S]; order: -1 adds up a projection's inputs from the other end."""
    w = {name: weight.to(dtype) for name, weight in weights.items()}

    def project(x: Tensor, name: str) -> Tensor:
        return x @ w[name].T if order == 1 else x.flip(-1) @ w[name].flip(-1).T

    def normed(x: Tensor) -> Tensor:
        return (x.float() * x.float().square().mean(-1, keepdim=True).rsqrt()).to(dtype)

    x = w["embedding"][tokens]
    for layer in range(LAYERS):
        h = normed(x)
        q, k, v = (project(h, f"{layer}.{name}").unflatten(-1, (4, -1)).transpose(1, 2) for name in "qkv")
        h = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + project(h.transpose(1, 2).flatten(2), f"{layer}.o")
        x = x + project(torch.relu(project(normed(x), f"{layer}.up")), f"{layer}.down")
    return project(normed(x), "head")


class Server:
    """Control of a server that generates greedily with these weights."""

    endpoint = SimpleNamespace(index=0, url="http://127.0.0.1:1")

    def __init__(self, weights: dict[str, Tensor], dtype: torch.dtype) -> None:
        self.weights, self.dtype = weights, dtype

    def object(self, method: str, path: str, body: Any) -> Any:
        tokens, pairs = list(body["input_ids"]), []
        for _ in range(body["sampling_params"]["max_new_tokens"]):
            logprobs = (
                logits_of(self.weights, torch.tensor([tokens]), self.dtype, order=-1)[0, -1].float().log_softmax(0)
            )
            tokens.append(int(logprobs.argmax()))
            pairs.append([float(logprobs[tokens[-1]]), tokens[-1], None])
        return {"output_ids": tokens[-len(pairs) :], "meta_info": {"output_token_logprobs": pairs}}


def probed(
    weights: dict[str, Tensor], at_server: dict[str, Tensor], dtype: torch.dtype
) -> tuple[dict[int, str], float]:
    """The probe of one server by a trainer with `weights`."""

    def evaluate(rows: Rollout) -> TokenOutputs:
        logprobs = logits_of(weights, rows.tokens, dtype).float().log_softmax(-1)
        own = logprobs[:, :-1].gather(2, rows.tokens[:, 1:, None])[..., 0]
        return TokenOutputs(logprobs=torch.cat([torch.zeros(len(own), 1), own], dim=1))

    limits = BF16 if dtype is torch.bfloat16 else FP32
    probe = Probe(evaluate, SingleRank(), VOCAB, 1.0, num_tokens=TOKENS, limits=limits)
    return probe(cast(Any, {0: Server(at_server, dtype)}), [0])


def updated(weights: dict[str, Tensor], lr: float) -> dict[str, Tensor]:
    """Weights before an update of Adam at its first step: `lr` in either direction, everywhere."""
    generator = torch.Generator().manual_seed(7)
    return {
        name: weight + lr * (2.0 * torch.randint(2, weight.shape, generator=generator) - 1)
        for name, weight in weights.items()
    }


FAULTS = {
    "a layer has the next one's weights": lambda w: w | {f"1.{name}": w[f"2.{name}"] for name in PROJECTIONS},
    "a projection is transposed": lambda w: w | {"1.o": w["1.o"].T},
    "a projection is zero": lambda w: w | {"2.down": torch.zeros_like(w["2.down"])},
    "keys and values are swapped": lambda w: w | {"3.k": w["3.v"], "3.v": w["3.k"]},
    "two tensor-parallel halves are swapped": lambda w: w | {"1.down": w["1.down"].roll(HIDDEN * 2, dims=1)},
    "an update of 3e-2 is missing": lambda w: updated(w, 3e-2),
}
SEEDS = range(4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_a_healthy_network_passes(dtype: torch.dtype) -> None:
    for seed in SEEDS:
        weights = make_weights(seed)
        failed, largest = probed(weights, dict(weights), dtype)
        assert not failed
        assert (largest > 1e-3) == (dtype is torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_fault_is_found(fault: str, dtype: torch.dtype) -> None:
    for seed in SEEDS:
        weights = make_weights(seed)
        assert probed(weights, FAULTS[fault](weights), dtype)[0], f"seed {seed}"
