"""The client against a real server of a mixture: tokens, log-probs, seeds, stops, experts, aborts and a kill."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from mega_rl.agents.environment import Environment, Policy, Runner, TurnSampling
from mega_rl.agents.trajectory import Trajectory, rows_of
from mega_rl.parallel.comm import SingleRank
from mega_rl.rollout.sglang.control import Endpoint
from mega_rl.rollout.sglang.generation.engine import RoutedLayers, SglangRolloutEngine, SglangRolloutSettings
from mega_rl.rollout.sglang.generation.router import ServerRouter
from mega_rl.rollout.sglang.generation.samples import Sample, SampleRequest, Sampling, State
from mega_rl.types import Prompt, Rollout
from tests.helpers.distributed import run_ranks
from tests.helpers.fake_sglang import Answers, Generation, generated
from tests.helpers.models import write_tiny_checkpoint
from tests.helpers.sglang import needs_sglang, request, running_server
from tests.unit_tests.rollout.sglang.routing_on_ranks import forwards

pytestmark = [needs_sglang, pytest.mark.slow]

VERSION = 1
GREEDY = Sampling(temperature=0.7, top_p=1.0, top_k=0, max_new_tokens=24, stop_token_ids=(1,), greedy=True)
SAMPLED = Sampling(temperature=0.8, top_p=1.0, top_k=0, max_new_tokens=150, stop_token_ids=(1,))
EXPERTS, LAYERS, TOP_K = 4, 4, 2


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Endpoint, Path]]:
    folder = tmp_path_factory.mktemp("real_generation")
    write_tiny_checkpoint(folder / "model", family="qwen3_moe", tied=False, max_position_embeddings=8192)
    with running_server(folder / "model", folder, return_routing=True) as (process, endpoint):
        request(endpoint, "/update_weight_version", {"new_version": str(VERSION)}, key="admin")
        yield process.pid, endpoint, folder / "model"


@pytest.fixture
def fleet(server: tuple[int, Endpoint, Path]) -> Iterator[ServerRouter]:
    with closing(router_of(server[1])) as fleet:
        yield fleet


def router_of(endpoint: Endpoint) -> ServerRouter:
    router = ServerRouter([endpoint], vocab_size=50, max_concurrency=8, retries=2, request_timeout_s=120.0)
    router.mark(0, State.READY, version=VERSION)
    return router


def requests(num: int) -> list[SampleRequest]:
    return [SampleRequest((i, 0), tuple(3 + (i + j) % 40 for j in range(2 + i % 5)), 1000 + i) for i in range(num)]


def generate(fleet: ServerRouter, asked: list[SampleRequest], sampling: Sampling, **more: dict) -> Answers:
    return generated(fleet, asked, sampling, version=VERSION, deadline=time.monotonic() + 200, **more)


def start(fleet: ServerRouter, asked: list[SampleRequest], sampling: Sampling = SAMPLED) -> Generation:
    """Return a generation whose first samples are complete."""
    generation = Generation(fleet, asked, sampling, version=VERSION, deadline=time.monotonic() + 200)
    deadline = time.monotonic() + 100
    while not generation.answers.samples:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return generation


def logprobs_of(model: Any, asked: SampleRequest, sample: Sample, temperature: float) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([[*asked.prompt, *sample.token_ids]])).logits[0, len(asked.prompt) - 1 : -1]
    chosen = torch.tensor(sample.token_ids)[:, None]
    return (logits / temperature).log_softmax(-1).gather(1, chosen)[:, 0].tolist()


def test_greedy_tokens_and_all_logprobs_are_the_models(fleet: ServerRouter, server: tuple[int, Endpoint, Path]) -> None:
    asked = requests(6)
    model = AutoModelForCausalLM.from_pretrained(server[2], dtype=torch.float32)
    for sampling, temperature in ((GREEDY, GREEDY.temperature), (SAMPLED, SAMPLED.temperature)):
        result = generate(fleet, asked, sampling)
        assert not result.failed_tries
        for one in asked:
            sample = result.samples[one.key]
            expected = logprobs_of(model, one, sample, temperature)
            assert sample.logprobs == pytest.approx(expected, abs=1e-5)  # fp32, another order of additions
    greedy = generate(fleet, asked, GREEDY)
    for one in asked:
        prompt = torch.tensor([one.prompt])
        tokens = model.generate(prompt, max_new_tokens=24, do_sample=False, eos_token_id=1, pad_token_id=0)
        assert greedy.samples[one.key].token_ids == tokens[0, len(one.prompt) :].tolist()


def test_sample_depends_on_seed_and_ends_at_stop(fleet: ServerRouter) -> None:
    asked = requests(12)
    first = generate(fleet, asked, SAMPLED)
    again = generate(fleet, list(reversed(asked)), SAMPLED)
    other = generate(fleet, [SampleRequest(one.key, one.prompt, one.seed + 1) for one in asked], SAMPLED)
    tokens = [[result.samples[one.key].token_ids for one in asked] for result in (first, again, other)]
    assert tokens[0] == tokens[1]
    assert sum(one == two for one, two in zip(tokens[0], tokens[2], strict=True)) <= 2  # one-token ones may agree
    stopped = [sample for sample in first.samples.values() if sample.finish == "stop"]
    assert stopped
    assert all(sample.token_ids.index(1) == len(sample.token_ids) - 1 for sample in stopped)
    assert all(len(sample.token_ids) == 150 for sample in first.samples.values() if sample.finish == "length")


def test_a_sample_is_the_same_beside_greedy_ones(fleet: ServerRouter, server: tuple[int, Endpoint, Path]) -> None:
    """A health check, or a validation, may share a batch with it."""
    asked = requests(4)
    alone = generate(fleet, asked, SAMPLED)
    others = [SampleRequest((100 + i, 0), one.prompt, one.seed) for i, one in enumerate(asked)]
    with closing(router_of(server[1])) as second:
        generation = Generation(
            second,
            others,
            replace(GREEDY, max_new_tokens=150, stop_token_ids=()),
            version=VERSION,
            deadline=time.monotonic() + 200,
        )
        beside = generate(fleet, asked, SAMPLED)
        assert len(generation.result().samples) == len(others)
    for one in asked:
        assert beside.samples[one.key].token_ids == alone.samples[one.key].token_ids


def test_interrupted_sample_continues_with_the_same_tokens(fleet: ServerRouter) -> None:
    asked, sampling = requests(12), replace(SAMPLED, return_routing=True)
    whole = generate(fleet, asked, sampling)
    first = start(fleet, asked, sampling).result(interrupt=True)
    assert not first.failures
    rest = [one for one in asked if one.key in first.unserved]
    second = generate(fleet, rest, sampling, partials=first.unserved)
    for one in asked:
        sample, expected = {**first.samples, **second.samples}[one.key], whole.samples[one.key]
        assert (sample.token_ids, sample.versions) == (expected.token_ids, expected.versions)
        assert sample.routing in (expected.routing, b"")  # aborted at its last token: unknown
        assert sample.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    assert first.tokens + second.tokens == whole.tokens, "no token was generated twice"
    assert all(second.samples[one.key].routing for one in rest), "the last answer has the experts of all tokens"


def running(server: tuple[int, Endpoint, Path]) -> int:
    """Return the requests that the server decodes or keeps waiting, by its own account."""
    _, answer = request(server[1], "/v1/loads?include=core", key="admin")
    return sum(one["num_running_reqs"] + one["num_waiting_reqs"] for one in answer["loads"])


def test_a_dropped_request_leaves_nothing_on_the_server(
    fleet: ServerRouter, server: tuple[int, Endpoint, Path]
) -> None:
    """An environment that cancels its turn: the server stops decoding it, and the others get their tokens."""
    endless = replace(SAMPLED, max_new_tokens=5000, stop_token_ids=())
    asked, answers = requests(4), dict[int, Any]()
    fleet.open(endless, version=VERSION, deadline_s=lambda count: 200.0)
    begin = time.monotonic()
    drops = [fleet.ask(replace(one, limit=5000), partial(answers.__setitem__, i)) for i, one in enumerate(asked[:3])]
    fleet.ask(replace(asked[3], limit=40), partial(answers.__setitem__, 3))
    while 3 not in answers:
        assert time.monotonic() < begin + 100
        time.sleep(0.01)
    while running(server) != 3:  # it counts once a round
        assert time.monotonic() < begin + 100
    for drop in drops:
        drop()
    dropped = time.monotonic()
    while running(server):
        assert time.monotonic() < dropped + 5.0, "the server decodes what nobody waits for"
    fleet.result()
    assert [answers[i].finish for i in range(3)] == ["partial"] * 3
    assert len(answers[3].token_ids) == 40


class Agent(Environment):
    """Two turns, and tokens to read between them; every second sample takes the second one on a fork, too."""

    async def run(self, policy: Policy, prompt: Prompt, trajectory: Trajectory) -> None:
        await policy.turn(limit=5)
        for branch in range(1 + trajectory.sample_index):
            if branch:
                trajectory.fork(trajectory.branches[0], 1)
            trajectory.give([10 + prompt.index, 20 + branch, 30])
            await policy.turn(limit=8)


def rows_of_turns(engine: SglangRolloutEngine, prompts: list[Prompt]) -> Rollout:
    made = [Trajectory(one, one.index, sample, limit=24) for one in prompts for sample in range(2)]
    runner = Runner(Agent(), "rollout.source='agent.py:Agent'", vocab_size=50)
    played = runner.run(made, partial(engine.turns, how=TurnSampling((0, 1))))
    assert [one.what for one in played if one.failure] == []
    return rows_of([one.trajectory for one in played], version=VERSION, with_branches=True, routed=(LAYERS, TOP_K))


@pytest.fixture(scope="module", params=["responses", "turns"])
def routed(
    server: tuple[int, Endpoint, Path], request: pytest.FixtureRequest
) -> tuple[Rollout, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Rows of the engine, two samples of each prompt, and the trainer's passes over them by the experts they replay."""
    with closing(router_of(server[1])) as fleet:
        engine = SglangRolloutEngine(
            fleet,
            everyone=SingleRank(),
            weight_version=lambda: VERSION,
            bring_back=lambda lost, refit: pytest.fail(f"lost {lost}"),
            settings=SglangRolloutSettings(
                sampling=replace(SAMPLED, max_new_tokens=20),
                max_positions=256,
                timeout_s=120.0,
                concurrency=8,
                restarts=0,
                max_failed_share=0.0,
                routed=RoutedLayers((True,) * LAYERS, TOP_K),
            ),
        )
        asked = requests(6)
        prompts = [Prompt(index=i, token_ids=one.prompt, text="", answer="") for i, one in enumerate(asked)]
        if request.param == "turns":
            rows = rows_of_turns(engine, prompts)
        else:
            rows = engine.generate(prompts, range(len(prompts)), n=2, seed=(0, 1))
    columns = {"tokens": rows.tokens, "prompt_lengths": rows.prompt_lengths, "lengths": rows.lengths}
    replays = {"free": None, "server's": rows.routing, "shifted": rows.routing.roll(1, dims=1)}
    return rows, run_ranks(1, forwards, server[2], SAMPLED.temperature, columns, replays)[0]


def agreement(one: torch.Tensor, other: torch.Tensor, where: torch.Tensor) -> float:
    """Return the share of (token, layer) with the same experts in any order, of the tokens at `where` [B, S]."""
    return (one.sort(-1).values == other.sort(-1).values).all(-1)[where].double().mean().item()


def test_server_reports_the_experts_of_the_trainer(routed: Any) -> None:
    """For each token but a row's last, prompts included, and for no token's neighbour."""
    rows, passes = routed
    known = torch.arange(rows.tokens.size(1)) < rows.lengths[:, None] - 1
    assert (rows.routing.dtype, rows.routing.shape) == (torch.int16, (*rows.tokens.shape, LAYERS, TOP_K))
    assert (rows.routing[~known] == -1).all()
    assert set(rows.routing[known].unique().tolist()) == set(range(EXPERTS))
    assert (rows.routing[known].sort(-1).values.diff(dim=-1) > 0).all(), "no expert twice"
    own = passes["free"][1]
    # float32 on both sides. Where two experts are equal but for rounding the sides may differ; none of 1000 does here.
    assert agreement(rows.routing, own, known) > 0.99
    # Half of the tokens have a neighbour with the same experts: rows repeat tokens.
    for places in (-1, 1):
        assert agreement(rows.routing.roll(places, dims=1), own, known) < 0.7


def test_trainer_replays_reported_experts(routed: Any) -> None:
    rows, passes = routed
    known = torch.arange(rows.tokens.size(1)) < rows.lengths[:, None] - 1
    logprobs, experts = passes["server's"]
    assert agreement(rows.routing, experts, known) == 1.0
    differences = (logprobs - rows.rollout_logprobs).abs()[rows.loss_mask]
    assert differences.max() < 1e-4  # float32 sums in another order
    shifted = (passes["shifted"][0] - rows.rollout_logprobs).abs()[rows.loss_mask]
    assert shifted.mean() > 0.1, "a neighbour's experts are not the token's"


def test_a_killed_server_loses_no_sample(fleet: ServerRouter, server: tuple[int, Endpoint, Path]) -> None:
    """The last test here: it takes the server away."""
    asked = requests(40)
    generation = start(fleet, asked)
    os.killpg(server[0], signal.SIGKILL)
    began = time.monotonic()
    result = generation.result()
    assert time.monotonic() - began < 30
    assert not result.failures
    assert result.samples.keys() | result.unserved.keys() == {one.key for one in asked}
    assert len(result.samples) + len(result.unserved) == len(asked)
    assert result.unserved
    assert fleet.states()[0][0] is State.DOWN
