"""On-policy distillation over the whole vocabulary: the divergence of the student's distributions from a teacher's.

    loss = D(p, q)      D: mega_rl.parallel.divergence

At each token of the student's own samples, with the exact gradient at its prefix; how a token changes the prefixes of
later ones is left out. Source: Agarwal et al. 2023 (GKD), arXiv:2306.13649, eq. 3 with student data alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mega_rl.algorithms.losses.base import PolicyTokens
from mega_rl.config.schema.algorithms import TeacherDivergenceSettings


@dataclass(frozen=True)
class TeacherDivergence(TeacherDivergenceSettings):
    """The divergence itself; reads no advantages. Token means: actor/teacher_divergence, nats."""

    def __call__(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        assert tokens.divergence is not None, "a teacher has taught"
        return tokens.divergence, {"actor/teacher_divergence": tokens.mean(tokens.divergence)}
