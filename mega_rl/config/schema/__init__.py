"""Every key of a recipe: a frozen dataclass per section, with field ranges in metadata.

`field(metadata={"doc", "unit", "min", "max", "choices"})` is the single source for the loader's checks, for
`--print-config` and for docs/config.md. A field that is a dataclass is a section: `engine.megatron.tp` is the field
`tp` of MegatronConfig. Nothing here imports torch, or anything that does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from mega_rl.config.schema.data import SuccessCurriculum, ValidationConfig
from mega_rl.config.schema.engine import (
    DataParallelConfig,
    EngineConfig,
    MegatronConfig,
    MegatronOptimizerConfig,
    MoeConfig,
    ReferenceLayoutConfig,
)
from mega_rl.config.schema.rollout import (
    ChatConfig,
    DataConfig,
    OverlongConfig,
    RewardConfig,
    RewardFunctionConfig,
    RewardHttpConfig,
    RolloutConfig,
    SglangServerConfig,
)
from mega_rl.config.schema.training import (
    AdapterConfig,
    AlgorithmConfig,
    CheckpointConfig,
    MetricsConfig,
    MicrobatchConfig,
    ModelConfig,
    OptimConfig,
    TrainerConfig,
)

Origin = str | list[str] | dict[str, object]  # pinned names in the form of their setting


@dataclass(frozen=True)
class Config:
    """All settings of a run."""

    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    algorithm: AlgorithmConfig = dataclasses.field(default_factory=AlgorithmConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    reward: RewardConfig = dataclasses.field(default_factory=RewardConfig)
    validation: ValidationConfig = dataclasses.field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = dataclasses.field(default_factory=MetricsConfig)
    trainer: TrainerConfig = dataclasses.field(default_factory=TrainerConfig)
    # No setting: pinned Hub names of settings that hold the path of a downloaded copy (`mega_rl.config.keys`).
    origins: Mapping[str, Origin] = dataclasses.field(default_factory=dict)
