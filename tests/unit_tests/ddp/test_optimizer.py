"""The optimizer step is torch's AdamW with clipping by the global norm, whatever the layout; and the schedule."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mega_rl.algorithms.statistics import Sequences
from mega_rl.config.keys import kind_of
from mega_rl.config.schema import AlgorithmConfig, Config, MegatronOptimizerConfig, OptimConfig, TrainerConfig
from mega_rl.types import Experience, TokenOutputs
from tests.helpers.distributed import run_ranks
from tests.helpers.engines import exported, make_config, own_rows, replaced, running_engine
from tests.helpers.models import random_experience, write_tiny_checkpoint
from tests.helpers.selection import covering
from tests.unit_tests.distributed.engine_cases import losses

# A large eps keeps Adam from blowing rounding up where a gradient is small, so the comparison can be sharp.
OPTIM = OptimConfig(lr=0.5, weight_decay=0.3, beta1=0.8, beta2=0.9, eps=1e-3, clip_grad=0.05)
RATES = [1e-2, 5e-3, 2e-3]
CASES: dict[str, dict[str, Any]] = {
    "dp2": {"layout": "dp2"},
    "dp2, not sharded": {"layout": "dp2", "distributed": False},
    "tp2-sp": {"layout": "tp2-sp"},
    "pp2": {"layout": "pp2"},
}
# (model, layout, dtype, optimizer sharded); each with all or some of its state on the host, and with none
OFFLOADS: dict[str, dict[str, Any]] = {
    "fp32": {"layout": "dp2"},
    "fp32, not sharded": {"layout": "dp2", "distributed": False},
    "bf16": {"layout": "dp2", "dtype": "bf16"},
    "bf16, not sharded": {"layout": "dp2", "dtype": "bf16", "distributed": False},
}
ON_HOST = covering([(case, share) for case in OFFLOADS for share in (0.5, 1.0)])
EXPERTS: dict[str, dict[str, Any]] = {
    "ep2": {},
    "ep2, not sharded": {"distributed": False},
    "ep2, on the host": {"cpu_offload": 1.0},
}
SCHEDULES = {
    "constant": OptimConfig(),
    "warm-up": OptimConfig(warmup_steps=4),
    "linear": OptimConfig(schedule="linear", warmup_steps=2, min_lr_ratio=0.0),
    "linear to a tenth": OptimConfig(schedule="linear", min_lr_ratio=0.1),
    "cosine": OptimConfig(schedule="cosine", warmup_steps=2, min_lr_ratio=0.5),
    "warm-up to the last step but one": OptimConfig(schedule="linear", warmup_steps=9, min_lr_ratio=0.5),
}


def run_cases(rank: int, checkpoint: str) -> dict[str, Any]:
    """Weights and norms after three steps on each layout, the reference's, and the schedules."""
    from mega_rl.parallel.accelerator import prepare

    prepare("auto")
    from mega_rl.ddp.optimizer import learning_rate

    results: dict[str, Any] = {name: run_engine(Path(checkpoint), **case) for name, case in CASES.items()}
    results["schedules"] = {
        name: [learning_rate(step, peak=2.0, optim=optim, total_steps=10) for step in range(12)]
        for name, optim in SCHEDULES.items()
    }
    results["one step"] = learning_rate(0, peak=2.0, optim=OptimConfig(schedule="linear"), total_steps=1)
    for name, case in OFFLOADS.items():
        same = [other for other, settings in CASES.items() if settings == case]
        results[name] = results[same[0]] if same else run_engine(Path(checkpoint), **case)
    for name, share in ON_HOST:
        results[f"{name} {share}"] = run_engine(Path(checkpoint), **OFFLOADS[name], cpu_offload=share)
    results["experts"] = {name: run_experts(f"{checkpoint}_routed", ep=2, **optim) for name, optim in EXPERTS.items()}
    if rank == 0:
        results["reference"] = run_reference(Path(checkpoint))
    return results


def run_one_rank(rank: int, checkpoint: str) -> dict[str, Any]:
    """The mixture of experts without expert parallelism, and the rates of a run's roles."""
    return run_experts(f"{checkpoint}_routed", ep=1) | {"rates": role_rates()}


def role_rates() -> dict[str, list[float]]:
    """Learning rates of the roles' updates over a run with a critic's warm-up, each on an engine that only listens."""
    from mega_rl.algorithms.kl import KLController
    from mega_rl.trainer.assemble.algorithms import build_actor_role, build_critic_role, choose_method
    from tests.unit_tests.workers.test_models import BATCH, RecordingEngine

    config = Config(
        optim=OptimConfig(lr=1.0, critic_lr=10.0, schedule="linear", warmup_steps=2, min_lr_ratio=0.1),
        algorithm=AlgorithmConfig(advantage=kind_of("algorithm.advantage", "gae"), critic_warmup_steps=3),
        trainer=TrainerConfig(steps=8),
    )
    engines = {"actor": RecordingEngine({"loss": 1.0}), "critic": RecordingEngine({"loss": 1.0})}
    method, steps = choose_method(config), config.trainer.steps
    roles = [
        build_actor_role(method, config.optim, engines["actor"], KLController(0.0), total_steps=steps),
        build_critic_role(method, config.optim, engines["critic"], total_steps=steps),
    ]
    for step in range(config.trainer.steps):
        for role in roles:
            role.update(BATCH, step=step)
    return {name: [rate for _, _, rate in engine.updates] for name, engine in engines.items()}


def run_experts(checkpoint: str, *, ep: int, **optimizer: Any) -> dict[str, Any]:
    """Norms and weights of three clipped steps of a mixture of experts."""
    optim = replace(OPTIM, eps=1e-2)
    config = make_config(Path(checkpoint), optim=optim, optimizer=MegatronOptimizerConfig(**optimizer))
    with running_engine(replaced(config, "engine.megatron", ep=ep)) as engine:
        from mega_rl.ddp.optimizer import torch_optimizers

        rows = own_rows(random_experience(), engine)
        norms = [engine.train_minibatch(rows, losses("lm"), lr=rate)["grad_norm"] for rate in RATES]
        return {"norms": norms, "weights": exported(engine), "optimizers": len(torch_optimizers(engine.optimizer))}


def run_engine(checkpoint: Path, layout: str, *, dtype: str = "fp32", **optimizer: Any) -> dict[str, Any]:
    """Three optimizer steps of a MegatronEngine."""
    from mega_rl.ddp.optimizer import torch_optimizers

    placement = MegatronOptimizerConfig(**optimizer)
    config = make_config(checkpoint, layout=layout, dtype=dtype, optim=OPTIM, optimizer=placement)
    with running_engine(config) as engine:
        start = exported(engine)
        rows = own_rows(random_experience(), engine)
        norms = [engine.train_minibatch(rows, losses("lm"), lr=rate)["grad_norm"] for rate in RATES]
        inner = torch_optimizers(engine.optimizer)
        groups = [group for optimizer in inner for group in optimizer.param_groups]
        state = [value for optimizer in inner for p in optimizer.state for value in optimizer.state[p].values()]
        return {
            "state": [value.clone() for value in state],
            "on host": sum(len(getattr(optimizer, "_on_host", ())) for optimizer in inner),
            "parameters": sum(len(group["params"]) for group in groups),
            "start": start,
            "weights": exported(engine),
            "norms": norms,
            "classes": sorted({type(optimizer).__name__ for optimizer in inner}),
            "fused": [bool(group["fused"]) and not group["foreach"] for group in groups],
            "dtypes": sorted({str(p.dtype) for group in groups for p in group["params"]}),
        }


def run_reference(checkpoint: Path) -> dict[str, Any]:
    """The same with transformers' model, torch's AdamW and torch's clipping, in fp64 and in one process."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": OPTIM.weight_decay}, {"params": others, "weight_decay": 0.0}],
        betas=(OPTIM.beta1, OPTIM.beta2),
        eps=OPTIM.eps,
    )
    norms = []
    for rate in RATES:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        reference_loss(model, random_experience()).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIM.clip_grad)))
        optimizer.step()
    return {"weights": {name: p.detach().clone() for name, p in model.named_parameters()}, "norms": norms}


def reference_loss(model: torch.nn.Module, batch: Experience) -> torch.Tensor:
    """The policy loss of padded rows, each token's fields beside its own log-prob."""
    inside = torch.arange(batch.tokens.size(1)) < batch.lengths[:, None]
    distribution = model(batch.tokens, attention_mask=inside.long()).logits.log_softmax(-1)[:, :-1]
    logprobs = distribution.gather(-1, batch.tokens[:, 1:, None])[..., 0]
    entropy = -(distribution.exp() * distribution).sum(-1)
    fields = {name: value[:, 1:] for name, value in batch.items() if value.dim() == 2}
    outputs, sequences = TokenOutputs(logprobs=logprobs, entropy=entropy), Sequences(fields["rows"], len(batch.rows))
    loss: torch.Tensor = losses("lm")(outputs, fields, sequences).loss
    return loss


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    # Qwen2 has biases beside norms and matrices.
    checkpoint = write_tiny_checkpoint(tmp_path_factory.mktemp("model"), family="qwen2", tied=True)
    write_tiny_checkpoint(Path(f"{checkpoint}_routed"), family="qwen3_moe", tied=False)
    results = dict(run_ranks(2, run_cases, str(checkpoint), device="cpu", timeout_s=300)[0])
    results["one rank"] = run_ranks(1, run_one_rank, str(checkpoint), device="cpu")[0]
    return results


@pytest.mark.parametrize("case", list(CASES))
def test_steps_are_those_of_adamw(results: dict[str, Any], case: str) -> None:
    """Norms before clipping to 1e-5; each tensor's way to 1e-4 of its length (fp32 against fp64)."""
    actual, reference = results[case], results["reference"]
    assert actual["norms"] == pytest.approx(reference["norms"], rel=1e-5)
    assert min(actual["norms"]) > 4 * OPTIM.clip_grad  # clipping has something to do
    assert reference["weights"].keys() <= actual["weights"].keys()
    for name, expected in reference["weights"].items():
        start = actual["start"][name].double()
        way = expected - start
        assert way.norm() > 0
        distance = (actual["weights"][name].double() - start - way).norm() / way.norm()
        assert distance <= 1e-4, name


def test_bf16_steps_on_fp32_main_parameters(results: dict[str, Any]) -> None:
    """What Adam holds is fp32 in a bf16 model."""
    assert results["bf16"]["dtypes"] == ["torch.float32"]
    assert {tensor.dtype for tensor in results["bf16"]["weights"].values()} == {torch.bfloat16}


def test_adam_is_fused(results: dict[str, Any]) -> None:
    """torch's loop over tensors costs ten times as much on a CPU."""
    for case in CASES:
        assert results[case]["classes"] == ["AdamW"]
        assert results[case]["fused"] == [True, True]


@pytest.mark.parametrize(("case", "share"), ON_HOST)
def test_state_on_the_host_changes_no_bit(results: dict[str, Any], case: str, share: float) -> None:
    """Norms, weights and moments after three steps; the share of the parameters is on the host, and steps there."""
    here, there = results[case], results[f"{case} {share}"]
    assert there["norms"] == here["norms"]
    assert all(torch.equal(there["weights"][name], expected) for name, expected in here["weights"].items())
    assert sorted(float(s.double().sum()) for s in there["state"]) == sorted(
        float(s.double().sum()) for s in here["state"]
    )
    assert here["on host"] == 0
    assert there["classes"] == ["HostAdamW"]
    if share == 1.0:
        assert there["on host"] == there["parameters"]
    else:
        assert 0 < there["on host"] < there["parameters"]


@pytest.mark.parametrize("case", list(EXPERTS))
def test_experts_share_the_norm_and_the_clipping(results: dict[str, Any], case: str) -> None:
    """Two optimizers, one of them for experts: spread over ranks they step as on one rank, by the norm over both."""
    one, many = results["one rank"], results["experts"][case]
    assert (one["optimizers"], many["optimizers"]) == (2, 2)
    assert many["norms"] == pytest.approx(one["norms"], rel=1e-5)
    assert min(one["norms"]) > 4 * OPTIM.clip_grad
    for name, expected in one["weights"].items():
        assert (many["weights"][name] - expected).abs().max() <= 1e-6, name


def test_schedules(results: dict[str, Any]) -> None:
    """Peak 2 over 10 steps, and 2 steps beyond: decay begins at the one step of the peak and ends at the last step."""
    cosine = [1 + (math.cos(math.pi * done / 8) + 1) / 2 for done in range(1, 9)]
    expected = {
        "constant": [2.0] * 12,
        "warm-up": [0.5, 1.0, 1.5, 2.0] + [2.0] * 8,
        "linear": [1.0, 2.0, 1.75, 1.5, 1.25, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0],
        "linear to a tenth": [2.0, 1.8, 1.6, 1.4, 1.2, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2],
        "cosine": [1.0, 2.0, *cosine, 1.0, 1.0],
        "warm-up to the last step but one": [2.0 * (step + 1) / 9 for step in range(9)] + [1.0] * 3,
    }
    assert expected.keys() == SCHEDULES.keys()
    for name, rates in expected.items():
        assert results["schedules"][name] == pytest.approx(rates, abs=1e-12), name
    assert results["one step"] == 2.0


def test_a_role_warms_up_in_its_own_first_steps(results: dict[str, Any]) -> None:
    """Eight steps, the first three of the critic alone: the actor's warm-up is whole, and both end with the run."""
    rates = results["one rank"]["rates"]
    assert rates["actor"] == pytest.approx([0.5, 1.0, 0.7, 0.4, 0.1])
    assert rates["critic"] == pytest.approx([5.0, *(10 - 9 * done / 6 for done in range(7))])
