"""The heart of the project: a whole PPO run does not depend on the layout it runs on.

Two steps of PPO or GRPO (`make test-full`: five of both) at 1 rank, TP2, TP2 with sequence parallelism, PP2, DP2, CP2
and on four ranks, and with the FSDP engine on one and two, with one seed, in fp32 at temperature 0.8: the same rollouts
token for token, and the same metrics to 1e-4 of their size. A mixture of experts likewise, over expert parallelism,
with its routing replayed.

Why the tolerance: fp32 sums in another order differ by 1e-7 to 1e-6, and Adam carries that from step to step. Tokens
are drawn by inverting a distribution at one uniform number each, so such a difference moves a draw only if the number
lies within 1e-6 of a boundary; with this seed none does.
"""

from __future__ import annotations

import dataclasses
import json
import math
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from mega_rl.algorithms.policy_losses import LOSSES as OBJECTIVES
from mega_rl.config.keys import kind_of
from mega_rl.config.schema import (
    AlgorithmConfig,
    Config,
    DataConfig,
    MegatronConfig,
    MetricsConfig,
    MicrobatchConfig,
    MoeConfig,
    RewardConfig,
    RewardFunctionConfig,
    RolloutConfig,
    TrainerConfig,
)
from mega_rl.config.schema.training import KlInLoss, KlInReward
from tests.helpers.distributed import run_ranks
from tests.helpers.engines import LAYOUTS, make_config
from tests.helpers.loops import step_metrics, watch_source
from tests.helpers.models import write_digit_tokenizer, write_tiny_checkpoint
from tests.helpers.selection import FULL, covering, without

pytestmark = pytest.mark.timeout(900)  # the first test pays for the launches of all

# The second step samples from the weights that the first one's updates have made, four of them in PPO.
STEPS = 5 if FULL else 2
# Layouts of the mixture.
EXPERT_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "experts 1": (1, {}),
    "experts ep2": (2, {"ep": 2}),
    "experts tp2-sp-ep2": (2, {"tp": 2, "sequence_parallel": True, "ep": 2, "etp": 1}),
}
FSDP_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {"fsdp 1": (1, {}), "fsdp 2": (2, {})}
# Four ranks are dear: "tp2-sp-pp2" has what the others have.
ALL_LAYOUTS = without(LAYOUTS, "tp2-pp2", "tp2-dp2") | EXPERT_LAYOUTS | FSDP_LAYOUTS
RELATIVE_TOLERANCE = 1e-4
ALGORITHMS = {
    "ppo": AlgorithmConfig(
        advantage=kind_of("algorithm.advantage", {"name": "gae", "gae_lambda": 0.95}),
        kl=KlInReward(coef=0.05, control="adaptive"),
        entropy_coef=0.01,
        epochs=2,
    ),
    "grpo": AlgorithmConfig(
        kl=KlInLoss(coef=0.05),
        loss_aggregation="seq-mean-token-mean",
    ),
}
ALONE = ("1", "experts 1")  # what the other layouts are compared with
MANY = [layout for layout in without(ALL_LAYOUTS, "pp2") if layout not in ALONE]  # "pp2-vpp2" has what "pp2" has
COMPARED = covering((layout, algorithm) for layout in MANY for algorithm in ALGORITHMS)
# Policy losses in four updates of each batch, each on another layout; all are in `make test-full`.
LOSSES = {
    f"grpo with {loss}": AlgorithmConfig(
        loss=kind_of("algorithm.loss", loss), loss_aggregation="seq-mean-token-mean", epochs=2
    )
    for loss in ((name for name in OBJECTIVES if not OBJECTIVES[name].needs_teacher) if FULL else ())
}
# Named parts of the reward, one of them at half weight.
PARTS = {"gdpo": AlgorithmConfig(advantage=kind_of("algorithm.advantage", "gdpo"), epochs=2)}
OTHERS = [layout for layout in ("cp2", *MANY) if layout not in EXPERT_LAYOUTS]
COMPARED += list(zip(OTHERS, sorted(LOSSES, key=lambda name: "gmpo" not in name), strict=False))
COMPARED += [(layout, "gdpo") for layout in (OTHERS if FULL else ("dp2",))]
RECOMPUTED = dataclasses.replace(ALGORITHMS["grpo"], old_logprobs="recompute")
REWARD = '''
def share_of_odd_digits(prompt, response, answer):
    """A reward that varies between responses and needs no skill."""
    digits = [int(c) for c in response if c.isdigit()]
    return sum(d % 2 for d in digits) / max(len(digits), 1) + 0.1 * len(response)


def in_parts(prompt, response, answer):
    """Two parts, of which one is equal in many samples of a prompt."""
    return {"odd": share_of_odd_digits(prompt, response, answer), "first": float(response[:1] in "13579")}
'''


def recorded_tokens(trainer: Any) -> list[torch.Tensor]:
    """Return a list that gets the tokens of all replicas whenever the run generates."""
    seen: list[torch.Tensor] = []

    def record(rollout: Any) -> None:
        everyone = trainer.batches.ranks.gather_rows(rollout)
        seen.append(everyone.tokens * (torch.arange(everyone.tokens.size(1)) < everyone.lengths[:, None]))

    watch_source(trainer, record)
    return seen


def write_inputs(folder: Path) -> Path:
    """A checkpoint with a tokenizer, prompts and a reward function."""
    for name, family in (("model", "qwen3"), ("experts", "qwen3_moe")):
        write_tiny_checkpoint(folder / name, family=family, tied=True)
        write_digit_tokenizer(folder / name, vocab_size=50)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(0, 100, 9)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    return folder


def run_config(folder: Path, layout: str, algorithm: str) -> Config:
    """Eight prompts, four samples each; PPO in two mini-batches twice over, GRPO in a single on-policy update."""
    experts = layout in EXPERT_LAYOUTS
    algorithm_config = (ALGORITHMS | LOSSES | PARTS | {"grpo recomputed": RECOMPUTED})[algorithm]
    return make_config(
        folder / ("experts" if experts else "model"),
        engine="fsdp" if layout in FSDP_LAYOUTS else "megatron",
        megatron=MegatronConfig(**ALL_LAYOUTS[layout][1]),
        moe=MoeConfig(routing_replay=experts),
        algorithm=algorithm_config,
        data=DataConfig(train_files=[str(folder / "train.jsonl")], max_prompt_tokens=8),
        rollout=RolloutConfig(n=4, max_new_tokens=8, temperature=0.8, verify_interval=1),
        reward=RewardConfig(
            function=f"{folder / 'reward.py'}:{'in_parts' if algorithm in PARTS else 'share_of_odd_digits'}",
            weights={"first": 0.5} if algorithm in PARTS else {},
            source=RewardFunctionConfig(
                workers=0
            ),  # their number, and so their metrics, would depend on the ranks of a host
        ),
        metrics=MetricsConfig(tensorboard=False, progress_bar=False, rollout_interval=0),
        trainer=TrainerConfig(
            run_dir=str(folder / f"run-{layout}-{algorithm}"),
            steps=STEPS,
            prompts_per_step=8,
            minibatch_size=4 if algorithm_config.epochs > 1 else 8,
            timeout_s=60.0,
            microbatch=MicrobatchConfig(max_tokens=128),
        ),
    )


def run_all(rank: int, folder: str, runs: list[tuple[str, str]]) -> dict[str, Any] | None:
    """Rollout tokens and metrics of every step, by "layout algorithm"."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    from mega_rl.trainer.assemble import build_trainer, session

    results = {}
    for layout, algorithm in runs:
        config = run_config(Path(folder), layout, algorithm)
        with session(config, accelerator) as groups, ExitStack() as resources:
            trainer = build_trainer(config, accelerator, groups, stop_requested=lambda: False, resources=resources)
            tokens = recorded_tokens(trainer)
            trainer.stage.publish(trainer.sync)
            metrics = [step_metrics(trainer, step) for step in range(STEPS)]
            results[f"{layout} {algorithm}"] = {"tokens": tokens, "metrics": metrics}
    return results if rank == 0 else None


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = write_inputs(tmp_path_factory.mktemp("inputs"))
    wanted = [*product(ALONE, ALGORITHMS), *product(["1"], [*LOSSES, *PARTS]), ("1", "grpo recomputed"), *COMPARED]
    results: dict[str, Any] = {}
    for world_size in sorted({size for size, _ in ALL_LAYOUTS.values()}):
        of_this_size = [run for run in wanted if ALL_LAYOUTS[run[0]][0] == world_size]
        results |= run_ranks(world_size, run_all, str(folder), of_this_size, timeout_s=280)[0]
    return results


@pytest.mark.parametrize(("layout", "algorithm"), COMPARED)
def test_runs_do_not_depend_on_the_layout(runs: dict[str, Any], layout: str, algorithm: str) -> None:
    """Same tokens in every rollout, same metrics in every step."""
    alone = "experts 1" if layout in EXPERT_LAYOUTS else "1"
    one, many = runs[f"{alone} {algorithm}"], runs[f"{layout} {algorithm}"]
    for step, (expected, actual) in enumerate(zip(one["tokens"], many["tokens"], strict=True)):
        assert torch.equal(actual, expected), f"rollouts of step {step}"
    for step, (expected, actual) in enumerate(zip(one["metrics"], many["metrics"], strict=True)):
        assert actual.keys() == expected.keys()
        wrong = {
            name: (actual[name], expected[name])
            for name in expected
            if comparable(name)
            and not math.isclose(actual[name], expected[name], rel_tol=RELATIVE_TOLERANCE, abs_tol=1e-6)
        }
        assert not wrong, f"step {step}"


def test_a_single_update_needs_no_forward_of_its_own(runs: dict[str, Any]) -> None:
    """Old log-probs from the update's forward or from one before it: the same run."""
    update, before = runs["1 grpo"], runs["1 grpo recomputed"]
    assert all(torch.equal(a, b) for a, b in zip(update["tokens"], before["tokens"], strict=True))
    for actual, expected in zip(update["metrics"], before["metrics"], strict=True):
        assert actual.keys() == expected.keys()
        for name in ("actor/loss", "actor/grad_norm", "actor/entropy", "kl/ref", "reward/mean"):
            assert actual[name] == pytest.approx(expected[name], rel=RELATIVE_TOLERANCE, abs=1e-6), name


def comparable(name: str) -> bool:
    """Whether a metric speaks of the training rather than of how it was cut (micro-batches, rounding differences)."""
    return not name.endswith("num_microbatches") and not name.startswith(("rollout/logprob_diff", "time/"))


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_the_runs_learn_something(runs: dict[str, Any], algorithm: str) -> None:
    """Guards the test above against comparing runs in which nothing happens."""
    metrics = runs[f"1 {algorithm}"]["metrics"]
    assert all(step["actor/grad_norm"] > 1e-3 and step["reward/std"] > 0.01 for step in metrics)
    assert metrics[-1]["kl/ref"] > 1e-4
    assert [step["rollout/weight_version"] for step in metrics] == [2.0 + step for step in range(STEPS)]
    assert max(step["rollout/logprob_diff_max"] for step in metrics) < 1e-4
    if algorithm == "ppo":
        assert metrics[-1]["critic/loss"] < metrics[0]["critic/loss"]
        assert metrics[-1]["kl/coef"] != metrics[0]["kl/coef"]
