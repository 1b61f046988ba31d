"""Which setting says what attention the model of a role runs."""

from __future__ import annotations

from typing import Literal, NamedTuple

from mega_rl.config.schema import Config

Role = Literal["actor", "critic", "reference", "reward"]


class RequestedAttention(NamedTuple):
    """What is asked for, one of `schema.ATTENTION`, and the key that asks."""

    word: str
    key: str


def requested_attention(config: Config, role: Role) -> RequestedAttention:
    """What a role's own key asks for; where that is "same", what `model.attn_implementation` does."""
    model = config.model
    own = {
        "actor": RequestedAttention("same", ""),
        "critic": RequestedAttention(model.critic_attn_implementation, "model.critic_attn_implementation"),
        "reference": RequestedAttention(model.ref_attn_implementation, "model.ref_attn_implementation"),
        "reward": RequestedAttention(config.reward.attn_implementation, "reward.attn_implementation"),
    }[role]
    return RequestedAttention(model.attn_implementation, "model.attn_implementation") if own.word == "same" else own
