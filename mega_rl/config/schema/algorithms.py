"""Settings of advantage estimators, policy losses and corrections, one dataclass each.

The class with the formula, in `mega_rl.algorithms`, inherits from the dataclass of its settings; class variables say
what the choice needs of a run. A user's own class has fields and class variables of the same kind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from mega_rl.config.schema.setting import setting


@dataclass(frozen=True)
class Settings:
    """Settings of a choice."""

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with settings that are each in range: "name=value: legal: ..."."""
        yield from ()


@dataclass(frozen=True)
class AdvantageSettings(Settings):
    """Needs of an advantage estimator; without settings."""

    needs_critic: ClassVar[bool] = False  # values of a critic, which then trains
    needs_groups: ClassVar[bool] = False  # several samples of each prompt
    takes_kl: ClassVar[bool] = False  # has rewards of single tokens, which a KL penalty may enter


@dataclass(frozen=True)
class GAESettings(AdvantageSettings):
    """Generalized advantage estimation over the values of a critic."""

    needs_critic: ClassVar[bool] = True
    takes_kl: ClassVar[bool] = True

    gamma: float = setting(1.0, "Discount per token.", min=0.0, max=1.0)
    gae_lambda: float = setting(1.0, "Decay of later errors of the values, per token.", min=0.0, max=1.0)
    whiten: bool = setting(True, "Whiten the advantages over the global batch.")


@dataclass(frozen=True)
class GRPOSettings(AdvantageSettings):
    """Rewards relative to the other samples of the prompt."""

    needs_groups: ClassVar[bool] = True

    std: str = setting(
        "group",
        "Deviation that centred rewards are divided by: the prompt's samples' (group), or none as in Dr. GRPO.",
        choices=("group", "none"),
    )


@dataclass(frozen=True)
class LossSettings(Settings):
    """Settings of a policy loss; none."""


@dataclass(frozen=True)
class PPOSettings(LossSettings):
    """The clipped objective."""

    clip_low: float = setting(0.2, "The ratio is clipped at 1 - clip_low.", above=0.0, max=1.0)
    clip_high: float = setting(0.2, "The ratio is clipped at 1 + clip_high.", above=0.0)
    dual_clip: float = setting(
        3.0,
        "Lower bound of the objective for negative advantages, as a ratio above 1: beyond it a token gives no "
        "gradient, which would grow with the ratio; 0 turns it off.",
        min=0.0,
    )

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with a dual clip that cuts off tokens inside the other bounds."""
        if 0 < self.dual_clip <= 1:
            yield f"dual_clip={self.dual_clip:g}: legal: 0 (off) or above 1"


@dataclass(frozen=True)
class CorrectionSettings(Settings):
    """No correction: every token counts fully."""


@dataclass(frozen=True)
class TISSettings(CorrectionSettings):
    """Truncated importance sampling."""

    cap: float = setting(2.0, "Each token's policy loss times min(pi_old / pi_rollout, cap).", above=0.0)


def defaults(area: type) -> dict[str, object]:
    """Return the default of every setting of a dataclass."""
    return {field.name: field.default for field in dataclasses.fields(area)}


ADVANTAGES: dict[str, type[AdvantageSettings]] = {"gae": GAESettings, "grpo": GRPOSettings}
LOSSES: dict[str, type[LossSettings]] = {"ppo": PPOSettings}
CORRECTIONS: dict[str, type[CorrectionSettings]] = {"none": CorrectionSettings, "tis": TISSettings}
