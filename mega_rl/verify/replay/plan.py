"""Plan of a replay for its ranks, as JSON; the config that they compute with."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from mega_rl.config.keys import keys_below, value_of, with_settings
from mega_rl.config.loader import load
from mega_rl.config.needs import unmet
from mega_rl.config.schema import Config
from mega_rl.tracking.records.format import RecordDescription
from mega_rl.verify.layouts import Layout
from mega_rl.verify.plan import REPLAY
from mega_rl.verify.rl.inputs import with_layout

ROUTING, SYNC = "rollout.sglang.return_routing", "rollout.sglang.sync.timeout_s"
KEPT_OF_ENGINE = "engine.megatron.transformer_impl"


@dataclass(frozen=True)
class ReplayPlan:
    """A record, the weights of its step, and the layout to compute it under."""

    record: str  # folder
    target: str  # folder that gets the step as the replay computes it
    models: dict[str, str]  # Hugging Face folder of each role: "actor", "critic", "reference"
    layout: Layout
    timeout_s: float

    def write(self, path: Path) -> None:
        """Write the plan for the ranks."""
        path.write_text(json.dumps({REPLAY: asdict(self)}), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> ReplayPlan:
        """Read a plan."""
        raw = json.loads(path.read_text(encoding="utf-8"))[REPLAY]
        layout = Layout(**{**raw.pop("layout"), "implied": ()})
        return ReplayPlan(**raw, layout=layout)


def recorded_config(description: RecordDescription) -> Config:
    """Return the config of the recorded run. Raises UserErrors for one that this version does not know."""
    return load(None, description.config)


def replay_config(recorded: Config, plan: ReplayPlan) -> Config:
    """Return the recorded config with the plan's layout and models. Raises UserErrors for what does not go together.

    Settings of the run's own layout, engine and servers take their defaults, and so does what has no effect in a
    replay.
    """
    models = plan.models
    same_engine = recorded.engine.backend == plan.layout.engine == "megatron"
    defaults = Config()
    reset = [key for key in keys_below("engine") if not (same_engine and key == KEPT_OF_ENGINE)]
    servers = [key for key in keys_below("rollout.sglang") if key != ROUTING]
    kept = {key: value_of(recorded, key) for key in keys_below("engine.megatron.moe") if same_engine}
    changed: dict[str, object] = {
        **{key: value_of(defaults, key) for key in (*reset, *servers)},
        **kept,
        "engine.backend": plan.layout.engine,
        "model.path": models["actor"],
        "model.critic_path": models.get("critic", ""),
        "model.ref_path": models.get("reference", ""),
        "algorithm.kl.reference_interval": 0,
        "metrics.records.interval": 0,
        "trainer.timeout_s": plan.timeout_s,
        SYNC: min(defaults.rollout.sglang.sync.timeout_s, plan.timeout_s / 2),
        "trainer.device": "auto",
    }
    config = with_settings(recorded, changed)
    idle = {entry.key: value_of(defaults, entry.key) for entry in unmet(config)}
    return with_layout(with_settings(config, idle), plan.layout, run_dir=Path(plan.target))
