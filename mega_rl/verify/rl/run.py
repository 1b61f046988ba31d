"""Follow a run on each layout: write a model, record the trainer, train the independent one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from transformers import Qwen3Config

from mega_rl.config.choices import ADVANTAGE
from mega_rl.config.keys import flat, with_settings
from mega_rl.config.schema import Config
from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.families import FAMILIES
from mega_rl.converters.hf.config import parse_hf_config, read_hf_config
from mega_rl.converters.safetensors.writer import write_checkpoint
from mega_rl.errors import UserError
from mega_rl.tracking import progress
from mega_rl.verify.launcher import RanksFailed, run_task
from mega_rl.verify.layouts import Layout, resolve_all, stages
from mega_rl.verify.rl.compare import UpdateErrors, follow, off
from mega_rl.verify.rl.independent.records import LockstepSettings
from mega_rl.verify.rl.inputs import EOS, PAD, SPECIAL, STAND_IN, VOCABULARY, LockstepRun, rows, with_layout
from mega_rl.verify.rl.rewards import RewardRule, lockstep_settings, reward_rule
from mega_rl.verify.tiny_models import write_tokenizer
from mega_rl.verify.twin import random_tensors, shrink

# The architecture without a model: that of the quickstart, with grouped heads.
ARCHITECTURE = {
    "model_type": Qwen3Config.model_type,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "vocab_size": len(VOCABULARY),
    "tie_word_embeddings": False,
}
# Parts of an independent trainer.
Trial: TypeAlias = tuple[LockstepSettings, RewardRule]
# A layout, its updates, and the first error out of tolerance or how the ranks failed; "": the two trainers agree.
Lockstep: TypeAlias = tuple[Layout, Sequence[UpdateErrors], str]


def prepare_run(run: LockstepRun, names: str, folder: Path) -> tuple[Config, list[Layout]]:
    """Write the inputs of a run; return its config and the layouts of a list."""
    lockstep_settings(run.config)
    layouts = resolve_all(names, read_architecture(run), runs=True)
    with progress.phase("making the model"):
        config, small = write_inputs(run, folder, multiple=stages(layouts))
    return config, resolve_all(names, small, runs=True)


def follow_layouts(
    config: Config, layouts: Sequence[Layout], folder: Path, *, timeout_s: float, tolerances: Mapping[str, float]
) -> Iterator[Lockstep]:
    """Yield the lockstep of each layout; the config names the small model and the prompts."""
    for layout in layouts:
        target = folder / layout.name
        real = with_layout(config, layout, run_dir=target / "run")
        try:
            record_runs({target: real}, label=f"the real run on {layout.name}", ranks=layout.ranks, timeout_s=timeout_s)
        except UserError as mistake:
            raise UserError(f"{layout.name}: {mistake}") from None
        except RanksFailed as failure:
            yield layout, (), str(failure)
            continue
        with progress.phase(f"following {layout.name}"):
            updates = tuple(follow_config(config, target))
        yield layout, updates, problem_of(updates, tolerances)


def follow_config(
    config: Config, trace: Path, plant: Callable[[Trial], Trial] = lambda trial: trial
) -> Iterator[UpdateErrors]:
    """Follow a run's trace; yields each update's errors. plant: puts a fault into the independent trainer."""
    trial = plant((lockstep_settings(config), reward_rule(config)))
    reference = Path(config.model.ref_path) if config.model.ref_path else None
    yield from follow(trace, Path(config.model.path), *trial, reference=reference)


def record_runs(runs: Mapping[Path, Config], *, label: str, ranks: int, timeout_s: float) -> None:
    """Run the real trainer of each config, with a trace in its folder. Raises as `run_task`."""
    for folder in runs:
        folder.mkdir(parents=True)
    given = [(flat(config), str(folder)) for folder, config in runs.items()]
    run_task("rl.record", given, next(iter(runs)), label=label, ranks=ranks, timeout_s=timeout_s)


def problem_of(updates: Sequence[UpdateErrors], tolerances: Mapping[str, float]) -> str:
    """Return the first error out of tolerance, in words; empty without one."""
    first = off(updates, tolerances)
    if first is None:
        return ""
    update, phase = first
    what = f" of {update.worst}" if phase == "gradient" else ""
    return f"{update.title}: {phase}{what} off by {update.errors[phase]:.2g}, tolerance {tolerances[phase]:g}"


def read_architecture(run: LockstepRun) -> HFConfig:
    """Return the architecture of a run's model before it is shrunk. Raises UserError."""
    return parse_hf_config(ARCHITECTURE, where=STAND_IN) if run.source is None else read_hf_config(run.source)


def write_inputs(run: LockstepRun, folder: Path, *, multiple: int) -> tuple[Config, HFConfig]:
    """Write the shrunk random model, its tokenizer and the prompts; return the config with them.

    multiple: its number of layers is one of it, for pipelines. An algorithm that learns from a reference gets another
    model of random weights as model.ref_path. Raises UserError for a model that cannot be shrunk.
    """
    seed = run.config.trainer.seed
    hf = read_architecture(run)
    where = str(run.source or STAND_IN)
    twin = shrink(hf, where=where, multiple=multiple, narrow=True)
    known = {"model_type": FAMILIES[hf.family].transformers_type}  # to the independent trainer
    raw = {**twin.raw, **known, "vocab_size": len(VOCABULARY), "eos_token_id": EOS, "pad_token_id": PAD}
    small = parse_hf_config(raw, where=f"{where}, shrunk")
    config_file, prompts = folder / "config.json", folder / "prompts.jsonl"
    config_file.write_text(json.dumps(raw), encoding="utf-8")
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows(seed)), "utf-8")
    named: dict[str, object] = {"data.source": "files", "data.train_files": [str(prompts)]}
    pad, eos, unknown = SPECIAL
    roles = ["path", "ref_path"] if ADVANTAGE.needs(run.config, "needs_reference") else ["path"]
    for number, role in enumerate(roles):
        model = folder / role
        write_checkpoint(model, random_tensors(small, seed=seed + number), files={"config.json": config_file})
        write_tokenizer(model, VOCABULARY, unknown=unknown, pad_token=pad, eos_token=eos, unk_token=unknown)
        named[f"model.{role}"] = str(model)
    return with_settings(run.config, named), small
