"""The whole engine on a fake GPU: one device at a time, no wait but those with a reason, and the memory that it needs.

Starts one subprocess for all cases, since the device must be there before torch.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest

from mega_rl.config.keys import with_settings
from mega_rl.config.schema import Config
from mega_rl.converters.hf.config import parse_hf_config
from mega_rl.plan.activations import training_pass
from mega_rl.plan.setup import Machine, PlannedModel, RunSetup
from mega_rl.plan.state import state_of
from tests.fake_gpu import guard
from tests.fake_gpu.launch import reports_of
from tests.fake_gpu.models import MODELS
from tests.helpers.selection import without

pytestmark = pytest.mark.skipif(guard.missing() is not None, reason=str(guard.missing()))

SP = {"sequence_parallel": True}
CASES: dict[str, dict[str, Any]] = {
    "one": {"model": "dense"},
    "recompute, entropy": {"model": "dense", "recompute": "full", "entropy_coef": 0.01, "objective": "clip_cov"},
    "critic": {"model": "dense", "head": "value"},
    "fp32 head": {"model": "dense", "fp32_head": True},
    "tp4-sp": {"model": "dense", "world": 8, "layout": {"tp": 4, **SP}},
    "cp2": {"model": "dense", "world": 2, "layout": {"cp": 2}, "objective": "gmpo"},
    "first of pp2": {"model": "dense", "world": 2, "rank": 0, "layout": {"pp": 2}},
    "last of pp2": {"model": "dense", "world": 2, "rank": 1, "layout": {"pp": 2}, "objective": "gspo"},
    "mixture": {"model": "moe", "world": 4, "layout": {"tp": 2, "ep": 4, "etp": 1, **SP}},
    "latent": {"model": "mla", "world": 4, "layout": {"tp": 2, "ep": 2, "etp": 1, **SP}},
    # Host memory is real: a turn of the whole vocabulary's state would fill 3.4 GB of it.
    "0.6b": {"model": "0.6b", "tokens": 16384, "length": 1024, "micros": 1, "passes": ["train", "forward"]},
    "0.6b, 2 layers": {"model": "0.6b, 2 layers", "tokens": 16384, "length": 1024, "micros": 1},
    "0.6b, 4 layers": {"model": "0.6b, 4 layers", "tokens": 16384, "length": 1024, "micros": 1, "passes": ["train"]},
}
CASES = without(CASES, "fp32 head", "first of pp2", "last of pp2")
PASSES = ("train", "forward", "export", "turn")

# Waits that are allowed, by "file:function kind", and why.
AT_THE_END = {
    "mega_rl/engines/microbatches.py:reduce_losses tolist": "metrics of a mini-batch, when its last kernel is queued",
    "mega_rl/engines/microbatches.py:collect copy to the host": "log-probs leave when every micro-batch is queued",
    "mega_rl/engines/models/routing.py:finish_training copy to the host": "loads of experts, after a mini-batch",
    "mega_rl/parallel/comm.py:_travelling copy to the host": "metrics of a mini-batch on their way to other ranks",
    "mega_rl/parallel/comm.py:_reduce copy to the device": "and back",
    "megatron/core/optimizer/clip_grads.py:get_grad_norm_fp32 item": "the norm decides whether weights may change",
    "megatron/core/utils.py:local_multi_tensor_applier item": "Megatron-Core reads each gradient's norm where neither "
    "Transformer Engine nor apex is there: once a step, behind the first of them nothing is queued",
}
IN_A_MIXTURE = {
    "megatron/core/transformer/moe/token_dispatcher.py:_maybe_dtoh_and_synchronize Event.synchronize": "the sizes of "
    "messages to experts: the router's choice, which the host must know",
    "megatron/core/transformer/moe/moe_utils.py:permute masked_select": "Megatron-Core's permutation without "
    "Transformer Engine's kernels",
}
IN_A_TURN = {
    "mega_rl/engines/offload.py:_copy_to_host Stream.synchronize": "once for all that leaves",
}
ALLOWED = AT_THE_END | IN_A_MIXTURE | IN_A_TURN


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """What the program reports of every case, by its name, and of "probe"."""
    arguments = ["probe", *(json.dumps(case) for case in CASES.values())]
    return dict(zip(["probe", *CASES], reports_of(arguments), strict=True))


def of(seen: dict[str, Any], case: str) -> dict[str, Any]:
    """The report of a case that ran to its end."""
    report: dict[str, Any] = seen[case]
    assert "error" not in report, "\n".join(
        line for line in report["error"].splitlines() if "registered at" not in line
    )
    return report


def waits_of(report: dict[str, Any], *passes: str) -> set[str]:
    """The waits of those of the passes that the case has."""
    return {wait for name in passes for wait in report.get(name, {"waits": {}})["waits"]}


def test_the_instrument_sees_each_kind(seen: dict[str, Any]) -> None:
    """Waits of every kind, two devices in one operator, numbers that are not known, and memory that comes and goes."""
    waits = {name: said for name, said in of(seen, "probe").items() if name not in ("memory", "seconds")}
    kinds = {
        name: [key.removeprefix("outside ") for key in said] for name, said in waits.items() if isinstance(said, dict)
    }
    assert kinds == {
        "nothing": [],
        "item": ["item"],
        "tolist": ["tolist"],
        "to the host": ["copy to the host"],
        "nonzero": ["nonzero"],
        "by a mask": ["indexing by a mask"],
        "fill by a mask": [],
        "synchronize": ["torch.cuda.synchronize"],
        "event": ["Event.synchronize"],
        "pageable": ["copy to the device from pageable memory"],
        "pinned, blocking": ["copy to the device"],
        "pinned, queued": [],
        "number from the host": ["copy to the device"],
        "collective of the device": [],
    }
    assert waits["two devices"] == "FakeTensorDeviceMismatchError"
    assert waits["collective of the host"] == "HostTensorError"
    assert waits["unknown"] == "UnknownValueError"
    peak, left, maker = seen["probe"]["memory"]
    assert (peak, left) == (8000, 0)  # two tensors of 1000 numbers
    assert maker.startswith("add float32[1000]")


@pytest.mark.parametrize("case", CASES)
def test_the_host_waits_for_reasons_alone(seen: dict[str, Any], case: str) -> None:
    """And tensors of host and device never meet: a case in which they did would have ended there."""
    report = of(seen, case)
    assert sorted(waits_of(report, *PASSES) - ALLOWED.keys()) == []


@pytest.mark.parametrize("case", [name for name in CASES if name not in ("mixture", "latent")])
def test_no_layer_and_no_micro_batch_makes_the_host_wait(seen: dict[str, Any], case: str) -> None:
    """Of a dense model: whatever waits does so when all micro-batches are queued."""
    report = of(seen, case)
    assert waits_of(report, "train", "forward") <= AT_THE_END.keys()
    assert waits_of(report, "export") == set()


def test_every_allowed_wait_is_one(seen: dict[str, Any]) -> None:
    """A wait that has gone leaves the list."""
    waits = {wait for case in CASES for wait in waits_of(of(seen, case), *PASSES)}
    assert sorted(ALLOWED.keys() - waits) == []


def test_packed_sequences_attend_by_their_lengths(seen: dict[str, Any]) -> None:
    """By torch's kernel for variable lengths: once a layer and micro-batch, forward and backward."""
    layers_and_micros = 2 * 2
    for case in ("one", "critic", "tp4-sp", "mixture", "latent"):
        kernels = of(seen, case)["train"]["kernels"]
        assert kernels["torch_attn::_varlen_attn"] == layers_and_micros, case
        assert kernels["torch_attn::_varlen_attn_backward"] == layers_and_micros, case
        assert of(seen, case)["forward"]["kernels"] == {"torch_attn::_varlen_attn": layers_and_micros}, case
    assert of(seen, "recompute, entropy")["train"]["kernels"]["torch_attn::_varlen_attn"] == 2 * layers_and_micros
    assert of(seen, "cp2")["train"]["kernels"] == {}


def test_memory_of_a_step(seen: dict[str, Any]) -> None:
    """Qwen3-0.6B's sizes with 2 layers at 16384 tokens, by the sums that one can do by hand.

    Of 187 million parameters: bf16 weights, FP32 gradients and FP32 main weights, 10 bytes each, and 8 of moments from
    the first step on. The logits, [16384, 151936] in bf16, are there once, with their gradient in their place.
    """
    report = of(seen, "0.6b")
    parameters = 151936 * 1024 + 2 * (1024 * (2048 + 2 * 1024) + 2048 * 1024 + 3 * 1024 * 3072 + 2 * 1024 + 256) + 1024
    assert report["build"]["live"] == pytest.approx(10 * parameters, rel=2e-3)
    assert report["train"]["live"] == pytest.approx(18 * parameters, rel=2e-3)
    logits = 2 * 16384 * 151936
    assert report["train"]["peak"] == pytest.approx(9.11e9, rel=0.03)
    assert re.match(r"4\.979 GB: 1 x mm bfloat16\[16384, 151936\]", report["train"]["largest"][0])
    temporaries = 0.35e9
    assert report["forward"]["peak"] - report["train"]["live"] < logits + temporaries


def test_memory_of_a_layer(seen: dict[str, Any]) -> None:
    """Activations of a layer of Qwen3-0.6B at 16384 tokens: 0.82 GB, 0.14 less than with padded classes of lengths."""
    two, four = (of(seen, f"0.6b, {count} layers") for count in (2, 4))
    grown = four["train"]["peak"] - two["train"]["peak"] - (four["build"]["live"] - two["build"]["live"])
    assert grown / 2 == pytest.approx(0.825e9, rel=0.03)


@pytest.mark.parametrize("case", ["0.6b", "0.6b, 2 layers", "0.6b, 4 layers"])
def test_the_plan_expects_the_peak(seen: dict[str, Any], case: str) -> None:
    """Activations, logits and working memory of a training pass, and the state before it."""
    rows = CASES[case]["tokens"] // CASES[case]["length"]
    settings = {
        "engine.megatron.transformer_impl": "local",
        "model.dtype": "bf16",
        "trainer.microbatch.max_tokens": CASES[case]["tokens"],
        "data.max_prompt_tokens": CASES[case]["length"] // 2,
        "rollout.max_new_tokens": CASES[case]["length"] // 2,
        "trainer.prompts_per_step": rows,
        "trainer.minibatch_size": rows,
    }
    hf = parse_hf_config(MODELS[CASES[case]["model"]])
    setup = RunSetup(with_settings(Config(), settings), {"model.path": hf}, Machine(1))
    model = PlannedModel("actor", hf, "lm", trainable=True)
    state, report = state_of(setup, model, 0), of(seen, case)
    built = report["build"]["live"]
    assert sum(training_pass(setup, model, 0).values()) == pytest.approx(report["train"]["peak"] - built, rel=0.05)
    # Adam's moments are there from the end of the first step on.
    planned = state.weights + state.gradients + state.optimizer - 2 * state.optimizer // 3
    assert planned == pytest.approx(built, rel=0.01)


def test_a_turn_gives_everything_back(seen: dict[str, Any]) -> None:
    """Weights, gradients and optimizer state: what is live after a step, up to tables and counters."""
    report = of(seen, "0.6b, 2 layers")
    assert report["turn"]["result"] == pytest.approx(report["train"]["live"], rel=0.01)


def test_the_cases_are_cases() -> None:
    """Every name of a case's settings is one, so that a misspelt layout cannot pass for another."""
    from tests.fake_gpu.cases import Case

    names = {field.name for field in dataclasses.fields(Case)}
    assert all(case.keys() <= names for case in CASES.values())
