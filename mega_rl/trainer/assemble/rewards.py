"""Reward role of a run, between the models and the rollouts."""

from __future__ import annotations

from pathlib import Path

from mega_rl.config.choices import ADVANTAGE
from mega_rl.config.schema import Config
from mega_rl.data.tokenizer_identity import read_tokenizer
from mega_rl.protocols import Ranks, Scorer
from mega_rl.rewards.build import RunRewards
from mega_rl.rewards.model import ModelScorer, RowLimits, TokenRows, token_rows
from mega_rl.trainer.assemble.data import Tokens, load_tokenizer
from mega_rl.trainer.assemble.roles import Roles


def read_rows_as(config: Config, tokens: Tokens) -> TokenRows | None:
    """Return how a reward model reads rollouts: the actor's tokens under the same tokenizer, else its own.

    None of other sources of rewards. Raises UserError for a tokenizer that cannot be loaded.
    """
    if config.reward.source.name != "model":
        return None
    path = Path(config.reward.model_path)
    own = load_tokenizer(path)
    identities = [read_tokenizer(folder) for folder in (path, Path(config.model.path))]
    digests = {None if identity is None else identity.digest for identity in identities}
    return token_rows(
        own,
        template=own.chat_template,
        same_tokenizer=len(digests) == 1 and None not in digests,
        rollout_template=tokens.tokenizer.chat_template if config.data.chat.template == "true" else None,
        reader=tokens.reader,
    )


def reward_role(
    config: Config,
    rewards: RunRewards,
    rows_as: TokenRows | None,
    roles: Roles,
    *,
    tokens: Tokens,
    everyone: Ranks,
) -> Scorer:
    """Return the reward role; rows_as: from `read_rows_as`."""
    trainer = config.trainer
    if rows_as is None:
        advantage = f"algorithm.advantage={config.algorithm.advantage}"
        return rewards.scorer(
            tokens.reader,
            replica=roles.actor_engine.replica,
            everyone=everyone,
            timeout_s=trainer.timeout_s,
            reads_parts=advantage if ADVANTAGE.needs(config, "needs_parts") else "",
        )
    hf, cp = roles.engines["reward"].sharding.hf, config.engine.megatron.cp
    limits = RowLimits(
        vocab_size=hf.vocab_size,
        positions=hf.max_position_embeddings,
        microbatch_tokens=trainer.microbatch.max_tokens if trainer.microbatch.packing else None,
        multiple=2 * cp if cp > 1 else 1,
    )
    return ModelScorer(roles.engines["reward"], rows_as, limits=limits, everyone=everyone)
