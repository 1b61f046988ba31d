"""Traffic of the plan is what live engines send, byte for byte, on every rank."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mega_rl.config.keys import with_settings
from mega_rl.converters.hf.config import read_hf_config
from mega_rl.plan.cost import Traffic, pass_traffic, update_traffic
from mega_rl.plan.setup import Machine, PlannedModel, RunSetup
from tests.helpers.models import write_tiny_checkpoint
from tests.unit_tests.plan.models import run_live
from tests.unit_tests.plan.test_states import UNTIED
from tests.unit_tests.plan.traffic_on_ranks import CASES, LENGTH, MICRO, ROWS, config_of, run_cases

pytestmark = pytest.mark.timeout(600)  # the first test pays for all launches
# Every token goes to every expert, so all ranks get alike whatever the router says.
EVERY_EXPERT: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts_per_tok": 4},
    "qwen2_moe": {"num_experts_per_tok": 4},
    "deepseek_v2": {"num_experts_per_tok": 4},
    "deepseek_v3": {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny checkpoint of every family."""
    root = tmp_path_factory.mktemp("models")
    return {
        name: write_tiny_checkpoint(root / name, family=name, tied=name not in UNTIED, **EVERY_EXPERT.get(name, {}))
        for name in {family for _, family, _ in CASES.values()}
    }


@pytest.fixture(scope="module")
def live(checkpoints: dict[str, Path]) -> dict[str, list[dict[str, Counter[Any]]]]:
    return run_live(CASES, checkpoints, run_cases)


@pytest.mark.parametrize("name", CASES)
def test_every_rank_sends_what_the_plan_says(
    name: str, live: dict[str, list[dict[str, Counter[Any]]]], checkpoints: dict[str, Path]
) -> None:
    """No tolerance: layers, ends, pipeline, experts, log-probs, outputs, gradients and weights."""
    world_size, family, case = CASES[name]
    hf = read_hf_config(checkpoints[family])
    head = case.get("head", "lm")
    setup = RunSetup(config_of(checkpoints[family], case), {"model.path": hf}, Machine(world_size))
    rows = ROWS * setup.layout.dp
    settings = {
        "trainer.prompts_per_step": rows,
        "trainer.minibatch_size": rows,
        "data.max_prompt_tokens": LENGTH // 2,
        "rollout.max_new_tokens": LENGTH // 2,
        "algorithm.entropy_coef": 0.01,
    }
    setup = RunSetup(with_settings(setup.config, settings), setup.checkpoints, setup.machine)
    model = PlannedModel("critic" if head == "value" else "actor", hf, head, trainable=True)
    micros = ROWS * LENGTH // MICRO
    for rank, sent in enumerate(live[name]):
        pp_rank = setup.layout.coordinates(rank).pp_rank
        training = [*pass_traffic(setup, model, 0, micros, pp_rank), *update_traffic(setup, model, pp_rank)]
        assert _by_group(pass_traffic(setup, model, micros, 0, pp_rank)) == sent["forward"], f"rank {rank}"
        assert _by_group(training) == sent["training"], f"rank {rank}"


def _by_group(traffic: list[Traffic]) -> Counter[Any]:
    """Return the bytes by operator and group, as the recorder names them."""
    sent: Counter[Any] = Counter()
    for each in traffic:
        if each.ranks > 1:
            sent[each.collective.replace("-", "_"), each.ranks, each.stride] += each.nbytes
    return sent
