"""Settings of advantage estimators and corrections, one dataclass each, and needs of sources.

The class with the formula, in `mega_rl.algorithms`, inherits from the dataclass of its settings; class variables say
what the choice needs of a run. A user's own class has fields and class variables of the same kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import ClassVar

from mega_rl.config.setting import Kind, by_name, setting


@dataclass(frozen=True)
class SingleTurn(Kind):
    """One response of the engine to each prompt."""

    name = "single_turn"


@dataclass(frozen=True)
class Files(Kind):
    """Rows of data.train_files, or of data.mixture."""

    name = "files"

    has_validation: ClassVar[bool] = False  # has held-out rows of its own, the split "validation"


@dataclass(frozen=True)
class AdvantageSettings(Kind):
    """Needs of an advantage estimator; without settings."""

    needs_critic: ClassVar[bool] = False  # values of a critic, which then trains
    needs_groups: ClassVar[bool] = False  # several samples of each prompt
    needs_reference: ClassVar[bool] = False  # log-probs of the reference, which is built even without a KL to it
    needs_greedy: ClassVar[bool] = False  # the reward of a greedy response to each prompt
    needs_parts: ClassVar[bool] = False  # named parts of the rewards
    takes_kl: ClassVar[bool] = False  # has rewards of single tokens, which a KL penalty may enter
    needs_no_rewards: ClassVar[bool] = False  # may learn without them: reward.source=none


@dataclass(frozen=True)
class GAESettings(AdvantageSettings):
    """Generalized advantage estimation over the values of a critic."""

    name = "gae"

    needs_critic: ClassVar[bool] = True
    takes_kl: ClassVar[bool] = True

    gamma: float = setting(1.0, "Discount per token.", min=0.0, max=1.0)
    gae_lambda: float = setting(
        1.0,
        "Decay of later errors per token, in the critic's targets, and in the advantages unless the next two say "
        "otherwise.",
        min=0.0,
        max=1.0,
    )
    policy_lambda: float = setting(
        0.0, "Decay for the policy's advantages, below the critic's; 0: gae_lambda.", min=0.0, max=1.0
    )
    length_alpha: float = setting(
        0.0,
        "Decay of the advantages, 1 - 1 / (length_alpha * response tokens), as in VAPO (0.05); 0: constant.",
        min=0.0,
    )
    whiten: bool = setting(True, "Whiten the advantages over the global batch.")

    def problems(self) -> Iterator[str]:
        """Yield that two settings give the policy's decay."""
        if self.policy_lambda and self.length_alpha:
            yield f"policy_lambda={self.policy_lambda:g} has no effect beside length_alpha={self.length_alpha:g}"


@dataclass(frozen=True)
class GRPOSettings(AdvantageSettings):
    """Rewards relative to the other samples of the prompt."""

    name = "grpo"

    needs_groups: ClassVar[bool] = True

    std: str = setting(
        "group",
        "Deviation that divides centred rewards: of the prompt's samples, of all, or none as in Dr. GRPO.",
        choices=("group", "batch", "none"),
    )


@dataclass(frozen=True)
class GDPOSettings(AdvantageSettings):
    """Named parts of the rewards, each relative to the other samples of the prompt, summed by reward.weights."""

    name = "gdpo"

    needs_groups: ClassVar[bool] = True
    needs_parts: ClassVar[bool] = True


@dataclass(frozen=True)
class RLOOSettings(AdvantageSettings):
    """Rewards relative to the mean of the prompt's other samples."""

    name = "rloo"

    needs_groups: ClassVar[bool] = True


@dataclass(frozen=True)
class ReMaxSettings(AdvantageSettings):
    """Returns relative to the reward of the prompt's greedy response."""

    name = "remax"

    needs_greedy: ClassVar[bool] = True
    takes_kl: ClassVar[bool] = True


@dataclass(frozen=True)
class OPOSettings(AdvantageSettings):
    """Rewards relative to the prompt's mean reward per token."""

    name = "opo"

    needs_groups: ClassVar[bool] = True


@dataclass(frozen=True)
class PassAtKSettings(AdvantageSettings):
    """Rewards of sets of k samples of a prompt, of which one has to be right."""

    name = "pass_at_k"

    needs_groups: ClassVar[bool] = True

    k: int = setting(4, "Samples of a set, fewer than rollout.n.", min=1)
    right_above: float = setting(0.5, "A sample with a reward above this is right.")
    std: str = setting(
        "group",
        "Deviation that divides advantages: of the rewards of the prompt's sets (group), or none.",
        choices=("group", "none"),
    )


@dataclass(frozen=True)
class ReinforcePlusPlusSettings(AdvantageSettings):
    """Returns of token rewards without a critic, whitened over the global batch."""

    name = "reinforce_plus_plus"

    takes_kl: ClassVar[bool] = True

    gamma: float = setting(1.0, "Discount per token.", min=0.0, max=1.0)


@dataclass(frozen=True)
class ReinforcePlusPlusBaselineSettings(AdvantageSettings):
    """REINFORCE++ of rewards relative to the mean of the prompt's samples."""

    name = "reinforce_plus_plus_baseline"

    needs_groups: ClassVar[bool] = True
    takes_kl: ClassVar[bool] = True


@dataclass(frozen=True)
class DistillationSettings(AdvantageSettings):
    """On-policy distillation: log ratios of a teacher, the model of model.ref_path, to the student."""

    name = "distillation"

    needs_reference: ClassVar[bool] = True
    needs_no_rewards: ClassVar[bool] = True

    gamma: float = setting(
        0.0, "Discount per token of later tokens' log ratios; 0: every token answers for itself.", min=0.0, max=1.0
    )
    reward_weight: float = setting(
        0.0, "Weight of the reward that is added, less the mean of the prompt's other samples.", min=0.0
    )


@dataclass(frozen=True)
class CorrectionSettings(Kind):
    """No correction: every token counts fully."""

    name = "none"


@dataclass(frozen=True)
class AutoCorrection(CorrectionSettings):
    """The correction that suits the run, which the log names."""

    name = "auto"


@dataclass(frozen=True)
class TISSettings(CorrectionSettings):
    """Truncated importance sampling."""

    name = "tis"

    level: str = setting(
        "token", "Ratio of each token, or of a response's probabilities.", choices=("token", "sequence")
    )
    cap: float = setting(2.0, "Each token's policy loss times min(ratio of pi_old to pi_rollout, cap).", above=0.0)


@dataclass(frozen=True)
class Band(CorrectionSettings):
    """Settings of corrections by a band of ratios."""

    low: float
    high: float

    def problems(self) -> Iterator[str]:
        """Yield the problem of a band that leaves out tokens on which both policies agree."""
        if not self.low <= 1.0 <= self.high:
            yield f"low={self.low:g}, high={self.high:g}: legal: low at most 1, high at least 1"


@dataclass(frozen=True)
class IcePopSettings(Band):
    """Importance weights of tokens inside a band; tokens outside do not train."""

    name = "icepop"

    low: float = setting(0.5, "Tokens of a smaller ratio of pi_old to pi_rollout do not train.", min=0.0)
    high: float = setting(5.0, "Tokens of a larger ratio do not train.", min=0.0)


@dataclass(frozen=True)
class GeometricRejectionSettings(Band):
    """Responses whose mean ratio of a token is outside a band do not train."""

    name = "geometric_rejection"

    low: float = setting(0.99, "Responses of a smaller geometric mean of pi_old over pi_rollout are rejected.", min=0.0)
    high: float = setting(1.01, "Responses of a larger geometric mean are rejected.", min=0.0)


@dataclass(frozen=True)
class SequenceRejectionSettings(Band):
    """Responses whose ratio of probabilities is outside a band do not train."""

    name = "sequence_rejection"

    low: float = setting(0.5, "Responses of a smaller ratio of pi_old to pi_rollout are rejected.", min=0.0)
    high: float = setting(2.0, "Responses of a larger ratio are rejected.", min=0.0)


@dataclass(frozen=True)
class OPSMSettings(CorrectionSettings):
    """Responses of negative advantage that the policy has moved away from do not train."""

    name = "opsm"

    delta: float = setting(
        0.1, "Largest mean of log(pi_rollout / pi) of a response that trains.", unit="nats per token", above=0.0
    )


ADVANTAGES = by_name(
    GAESettings,
    GRPOSettings,
    GDPOSettings,
    RLOOSettings,
    ReinforcePlusPlusSettings,
    ReinforcePlusPlusBaselineSettings,
    ReMaxSettings,
    OPOSettings,
    PassAtKSettings,
    DistillationSettings,
)
# Found by name, since the losses stand above this package: config reads their settings, and they read `setting`.
LOSSES: Mapping[str, type[Kind]] = import_module("mega_rl.algorithms.policy_losses").LOSSES
CORRECTIONS = by_name(
    AutoCorrection,
    CorrectionSettings,
    TISSettings,
    IcePopSettings,
    GeometricRejectionSettings,
    SequenceRejectionSettings,
    OPSMSettings,
)
