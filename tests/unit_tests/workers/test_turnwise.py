"""Generation ahead over the embedded engine, in turns with training: tokens, versions, random numbers, layouts."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from mega_rl.agents.environment import Environment, Policy, Runner
from mega_rl.agents.trajectory import Trajectory
from mega_rl.config.keys import with_settings
from mega_rl.parallel.comm import SingleRank
from mega_rl.rollout import embedded
from mega_rl.rollout.embedded import EmbeddedRounds
from mega_rl.rollout.sampling import Sampler, uniform_at
from mega_rl.rollout.sglang.generation.engine import SglangRolloutEngine, SglangRolloutSettings
from mega_rl.rollout.sglang.generation.samples import Sampling
from mega_rl.types import Arrived, Draw, Prompt
from mega_rl.verify.rl.compare import SamplerTest
from mega_rl.verify.rl.independent.records import SampledRow, ScoredSample
from mega_rl.workers.rollout import EnvironmentRollouts, RolloutContext, RolloutWorker
from mega_rl.workers.stream import ServerFlow
from tests.helpers.distributed import run_ranks
from tests.helpers.selection import FULL
from tests.unit_tests.distributed.test_layout_invariance import run_config, write_inputs
from tests.unit_tests.rollout.tiny_qwen3 import EOS_ID, VOCAB_SIZE, Checkpoint, make_checkpoint, make_engine

LONGEST, QUANTUM, N = 12, 5, 4
STOPS = list(range(0, VOCAB_SIZE, 8))
NEVER: Callable[..., None] = lambda *_, **__: pytest.fail("there are no servers")  # noqa: E731


class Turns(Environment):
    """Two turns with tokens to read between them."""

    max_failed_share: float = 0.0

    async def run(self, policy: Policy, prompt: Prompt, trajectory: Trajectory) -> None:
        await policy.turn(limit=5)
        trajectory.give([7, 9])
        await policy.turn()


class Versions:
    """The flow over a tiny model, whose weights change between rounds."""

    def __init__(self, checkpoints: list[Checkpoint], *, environment: Environment | None = None) -> None:
        self.checkpoints, self.version = checkpoints, 0
        ranks: Any = SingleRank()
        self.engine = make_engine(
            checkpoints[0],
            load=False,
            sampler=Sampler(0.8),
            max_new_tokens=LONGEST,
            stop_token_ids=STOPS,
            batch_size=16,
        )
        rounds = EmbeddedRounds(self.engine.turns, seed=7)
        sampling = Sampling(0.8, 1.0, 0, LONGEST, (EOS_ID, *STOPS))
        settings = SglangRolloutSettings(sampling, 64, math.inf, 1, 0, 0.0, token_versions=True)
        version = lambda: self.version  # noqa: E731
        own = SglangRolloutEngine(rounds, everyone=ranks, weight_version=version, bring_back=NEVER, settings=settings)
        worker, rollouts = RolloutWorker(self.engine, ranks, ranks, N, seed=7), None
        if environment is not None:
            tokenizer: Any = None
            context = RolloutContext(tokenizer, self.engine, sampling, N, 7, ranks, ranks, version)
            rollouts = EnvironmentRollouts(Runner(environment, "own", VOCAB_SIZE), context, ranks)
        self.flow = ServerFlow(
            worker, own, ranks, version, QUANTUM, math.inf, rollouts=rollouts, sample=rounds.sample, in_turns=True
        )

    def run(self, draws: int, prompts: int) -> list[tuple[int, Arrived]]:
        """Begin a draw and make a round under each version; return what arrives with the version of its step."""
        got = []
        for number in range(draws + LONGEST // QUANTUM):
            self.version += 1
            checkpoint = self.checkpoints[number % len(self.checkpoints)]
            self.engine.load_weights(checkpoint.model.state_dict().items())
            self.engine.finish_update(self.version)
            if number < draws:
                first = number * prompts
                made = {t: Prompt(t, (3 + t % 100, 5, 8 + t % 7), "", "") for t in range(first, first + prompts)}
                self.flow.add(Draw(first, prompts, number), made)
            arrived = self.flow.arrived(wait=False)
            self.flow.go_on()
            assert not self.flow.requests.runs, "a round runs next to training"
            got += [] if arrived is None else [(self.version, arrived)]
        assert not self.flow.flights
        self.flow.close()
        return got

    def model(self, version: int) -> Any:
        return self.checkpoints[(version - 1) % len(self.checkpoints)].model


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Checkpoint]:
    folder = tmp_path_factory.mktemp("versions")
    return [make_checkpoint(folder / str(seed), seed=seed) for seed in range(3)]


@torch.no_grad()
def logits_of(run: Versions, tokens: list[int], places: list[int], versions: list[int]) -> torch.Tensor:
    """[n, V] float64, of the weights of each token's version."""
    of = {version: run.model(version)(torch.tensor([tokens])).logits[0].double() for version in set(versions)}
    return torch.stack([of[version][place - 1] for place, version in zip(places, versions, strict=True)])


def samples_of(run: Versions, arrived: Arrived) -> list[tuple[ScoredSample, torch.Tensor]]:
    rows, samples = arrived.rollout, []
    assert rows.token_versions is not None
    for row in range(len(rows.tokens)):
        places = rows.loss_mask[row].nonzero().flatten().tolist()
        tokens = rows.tokens[row, : int(rows.lengths[row])].tolist()
        own = SampledRow(tokens, int(rows.prompt_lengths[row]), places)
        versions = rows.token_versions[row][places].tolist()
        assert versions == sorted(versions)
        sample = ScoredSample([own], int(rows.prompt_index[row]), 0.0, rows.rollout_logprobs[row][places].tolist())
        samples.append((sample, logits_of(run, tokens, places, versions)))
    return samples


@pytest.mark.parametrize("environment", [None, Turns()])
def test_each_token_is_of_its_versions_weights(checkpoints: list[Checkpoint], environment: Environment | None) -> None:
    """Log-probs of transformers' own forward by version, in responses and trajectories that live over several."""
    run = Versions(checkpoints, environment=environment)
    seen = set[int]()
    for version, arrived in run.run(draws=4, prompts=3):
        assert version - min(arrived.oldest) <= LONGEST // QUANTUM
        for sample, logits in samples_of(run, arrived):
            expected = (logits / 0.8).log_softmax(-1).gather(1, torch.tensor(sample.sampled)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(sample.rollout_logprobs).double(), expected, rtol=0, atol=1e-5)
        assert arrived.rollout.token_versions is not None
        rows = zip(arrived.rollout.token_versions, arrived.rollout.loss_mask, strict=True)
        seen |= {len(set(own[mask].tolist())) for own, mask in rows}
    assert seen == ({1, 2, 3} if environment is None else {1, 2})  # a trajectory samples ten tokens at most


def test_continued_responses_take_new_random_numbers(
    checkpoints: list[Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No (stream, position) twice; and the four sums of the sampler's test over responses of three versions."""
    used = list[tuple[int, int]]()

    def noted(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        used.extend(zip(keys.tolist(), positions.tolist(), strict=True))
        return uniform_at(keys, positions)

    monkeypatch.setattr(embedded, "uniform_at", noted)
    run = Versions(checkpoints)
    arrived = [one for _, one in run.run(draws=12, prompts=8)]
    assert len(used) == len(set(used)) > 2000
    test = SamplerTest(0.8)
    for one in arrived:
        pairs = samples_of(run, one)
        logits = {id(sample): own for sample, own in pairs}
        test.add([sample for sample, _ in pairs], lambda sample, logits=logits: logits[id(sample)])
    assert max(map(abs, test.deviations())) < 4.0, test.deviations()


SETTINGS: dict[str, Any] = {
    "trainer.steps": 6, "trainer.async_steps": 2, "trainer.prompts_per_step": 4, "trainer.minibatch_size": 2,
    "rollout.n": 2, "rollout.max_new_tokens": 12, "rollout.mismatch.mean_limit": 1.0,
    "rollout.mismatch.max_limit": 50.0, "optim.eps": 1e-3,
    "optim.lr": 1e-2, "algorithm.correction": "tis", "checkpoint.save_final": False, "checkpoint.save_interval": 3,
}  # fmt: skip
LAYOUTS = ("dp2", "tp2", "pp2", "fsdp 2")


def train(rank: int, folder: str, runs: list[tuple[str, str, dict[str, Any]]]) -> dict[str, Any]:
    """By name: tickets of each step, this replica's tokens and versions by (ticket, sample), weights, known moves."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("cpu")
    from mega_rl.trainer.assemble import build_trainer, session
    from tests.helpers.loops import engines_of, watch_batches

    facts = {}
    for name, layout, more in runs:
        config = run_config(Path(folder), layout, "grpo recomputed")
        config = with_settings(config, {**SETTINGS, "trainer.run_dir": f"{folder}/{name}", **more})
        steps, rows = list[list[int]](), dict[tuple[int, int], tuple[list[int], list[int]]]()

        def note(batch: Any, steps: list[list[int]] = steps, rows: dict[Any, Any] = rows) -> None:
            own, tickets = batch.rollout, batch.samples.tickets
            steps.append(tickets.tolist())
            for row, mask in enumerate(own.loss_mask):
                key = (int(tickets[own.prompt_index[row]]), int(own.sample_index[row]))
                rows[key] = own.tokens[row][mask].tolist(), own.token_versions[row][mask].tolist()

        with session(config, accelerator) as groups, ExitStack() as resources:
            trainer = build_trainer(config, accelerator, groups, stop_requested=lambda: False, resources=resources)
            watch_batches(trainer, note)
            moves = trainer.algorithm.guard.changes.of_versions  # type: ignore[attr-defined]
            before = dict(moves)
            trainer.fit()
            weights = {key: tensor.clone() for key, tensor in engines_of(trainer)["actor"].export_weights()}
        facts[name] = {"steps": steps, "rows": rows, "weights": weights, "moves": (before, dict(moves))}
    return facts


def test_resumed_run_knows_how_far_the_policy_moved_before(tmp_path: Path) -> None:
    """The last update before the checkpoint, too: tokens that are in flight there have the limit that they had."""
    write_inputs(tmp_path)
    whole = {"trainer.steps": 5, "checkpoint.save_interval": 4}
    resumed = {"checkpoint.resume": f"{tmp_path}/1/checkpoints/step_000004", "trainer.steps": 5}
    runs = [("1", "1", whole), ("again", "1", resumed)]
    facts = run_ranks(1, train, str(tmp_path), runs, timeout_s=200)[0]
    before, moves = facts["1"]["moves"]
    assert (before, [*moves]) == ({}, [2, 3, 4, 5, 6])
    assert all(0 < moved < math.inf for moved in moves.values())
    known = {version: moves[version] for version in (3, 4, 5)}
    assert facts["again"]["moves"] == (known, known | {6: moves[6]})


@pytest.mark.skipif(not FULL, reason="make test-full has these runs")
def test_layouts_and_resumed_runs_train_the_same_tokens(tmp_path: Path) -> None:
    """Two steps ahead in turns: one rank, others, and from the third step on, where responses are cut."""
    write_inputs(tmp_path)
    alone = run_ranks(1, train, str(tmp_path), [("1", "1", {})], timeout_s=200)[0]["1"]
    assert {len(set(versions)) for _, versions in alone["rows"].values()} >= {1, 2}
    resumed = {"checkpoint.resume": f"{tmp_path}/1/checkpoints/step_000003"}
    again = run_ranks(1, train, str(tmp_path), [("again", "1", resumed)], timeout_s=200)[0]["again"]
    assert again["steps"] == alone["steps"][3:]
    assert all(torch.equal(again["weights"][name], own) for name, own in alone["weights"].items())
    runs = [(layout, layout, {}) for layout in LAYOUTS] + [("dp2 again", "dp2", resumed)]
    of_ranks = run_ranks(2, train, str(tmp_path), runs, timeout_s=400)
    for name, _, more in runs:
        assert of_ranks[0][name]["steps"] == alone["steps"][3 if more else 0 :], name
        if more:
            continue  # on other ranks its responses in flight begin anew
        rows = of_ranks[0][name]["rows"] | of_ranks[1][name]["rows"]
        assert rows == alone["rows"], name
        for key, own in alone["weights"].items():
            torch.testing.assert_close(
                of_ranks[0][name]["weights"][key], own, rtol=1e-4, atol=1e-5, msg=f"{name} {key}"
            )
