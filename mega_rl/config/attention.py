"""Requests for attention: the setting that decides for the model of a role."""

from __future__ import annotations

from typing import Literal, NamedTuple

from mega_rl.config.schema import Config

Role = Literal["actor", "critic", "reference", "reward"]


class RequestedAttention(NamedTuple):
    """A word of `schema.ATTENTION` and the key that asks for it."""

    word: str
    key: str


def requested_attention(config: Config, role: Role) -> RequestedAttention:
    """Return the request of a role's own key, or where that is "same" that of `model.attn_implementation`."""
    model = config.model
    own = {
        "actor": RequestedAttention("same", ""),
        "critic": RequestedAttention(model.critic_attn_implementation, "model.critic_attn_implementation"),
        "reference": RequestedAttention(model.ref_attn_implementation, "model.ref_attn_implementation"),
        "reward": RequestedAttention(
            getattr(config.reward.source, "attn_implementation", "same"), "reward.source.attn_implementation"
        ),
    }[role]
    return RequestedAttention(model.attn_implementation, "model.attn_implementation") if own.word == "same" else own
