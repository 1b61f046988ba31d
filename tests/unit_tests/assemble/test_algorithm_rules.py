"""Choices of a policy gradient that follow from a config."""

from __future__ import annotations

import pytest

from mega_rl.assemble.trainer import policy_gradient_rules
from mega_rl.config.loader import load
from mega_rl.trainer.policy_gradient import PolicyGradientRules

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
    assert policy_gradient_rules(load(None, settings)) == rules
