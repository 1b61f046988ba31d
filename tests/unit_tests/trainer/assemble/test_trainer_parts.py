"""Parts of a trainer that follow from its config: rules of the algorithm, checks of sampled tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mega_rl.config.loader import load
from mega_rl.errors import RunError
from mega_rl.parallel.comm import SingleRank
from mega_rl.tracking.metrics.steps import WorkMeter
from mega_rl.trainer.assemble.algorithms import build_rules
from mega_rl.trainer.assemble.steps import watch_samples
from mega_rl.trainer.policy_gradient import PolicyGradientRules
from tests.helpers.rollouts import make_rollout

TWO_UPDATES = ("trainer.prompts_per_step=8", "trainer.minibatch_size=4")
ONE_UPDATE = ("trainer.prompts_per_step=8", "trainer.minibatch_size=8", "algorithm.advantage=grpo", "rollout.n=2")


@pytest.mark.parametrize(
    ("settings", "rules"),
    [
        (TWO_UPDATES, PolicyGradientRules()),
        ((*TWO_UPDATES, "algorithm.old_logprobs=rollout"), PolicyGradientRules(recompute_old_logprobs=False)),
        (ONE_UPDATE, PolicyGradientRules(recompute_old_logprobs=False)),
        ((*TWO_UPDATES, "reward.overlong.filter=true"), PolicyGradientRules(filter_truncated=True)),
        (
            (*TWO_UPDATES, "trainer.microbatch.skip_zero_advantages=true"),
            PolicyGradientRules(skip_zero_advantages=True),
        ),
    ],
    ids=["two updates", "the sampler's log-probs", "one update", "overlong filter", "zero advantages"],
)
def test_rules_follow_from_settings(settings: tuple[str, ...], rules: PolicyGradientRules) -> None:
    assert build_rules(load(None, settings)) == rules


@pytest.mark.parametrize(("async_steps", "counted"), [(0, 2.5), (1, 0.0)])
def test_sampled_tokens_are_counted_and_known_to_every_reader(async_steps: int, counted: float) -> None:
    """Five tokens on two ranks of a replica; their rate means nothing if generation runs ahead."""
    rollout = make_rollout([3, 2])
    largest = int(rollout.tokens.max())

    def roles(vocab_size: int) -> Any:
        engines = {
            role: SimpleNamespace(
                name=role,
                sharding=SimpleNamespace(hf=SimpleNamespace(vocab_size=size)),
                replica=SimpleNamespace(size=2),
            )
            for role, size in {"actor": 99, "reference": vocab_size}.items()
        }
        return SimpleNamespace(actor_engine=engines["actor"], engines=engines, work=WorkMeter(phase="generate"))

    config = load(None, [f"trainer.async_steps={async_steps}", "rollout.backend=sglang"])
    known = roles(largest + 1)
    watch_samples(config, known, SingleRank())(rollout)
    assert known.work.take_tokens()[0] == counted
    with pytest.raises(RunError, match=f"sampled token id {largest}, and the reference has a vocabulary of {largest}"):
        watch_samples(config, roles(largest), SingleRank())(rollout)
