"""Checks of checkpoints: an architecture that can be trained, and complete weight files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from mega_rl.config.plugins.choices import LOSS
from mega_rl.config.rules.reference import has_own_layout
from mega_rl.config.schema import Config
from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.families import FAMILIES, TRAINED
from mega_rl.converters.hf.companions import companions
from mega_rl.converters.hf.config import read_hf_config
from mega_rl.data.tokenizer_identity import read_json_object
from mega_rl.errors import UserError, UserErrors
from mega_rl.parallel.layout import ParallelLayout, parse_pipeline
from mega_rl.preflight.known_bugs import known_bug
from mega_rl.storage.safetensors_header import read_entries

# Properties of a checkpoint that its forward does not depend on.
_NOT_COMPUTED = ("eos_token_ids", "pad_token_id", "dtype", "initializer_range")


def checkpoint_paths(config: Config) -> dict[str, str]:
    """Return the folder of every checkpoint that the run reads, by config key."""
    model, reward = config.model, config.reward
    paths = {"model.path": model.path, "model.ref_path": model.ref_path, "model.critic_path": model.critic_path}
    if reward.source == "model":
        paths["reward.model.path"] = reward.model.path
    return {key: path for key, path in paths.items() if path}


def read_checkpoints(config: Config) -> tuple[dict[str, HFConfig], list[str]]:
    """Return the architecture of every checkpoint that could be read, by config key, and why others could not."""
    checkpoints: dict[str, HFConfig] = {}
    problems: list[str] = []
    if not config.model.path:
        problems.append("model.path is empty: name a Hugging Face checkpoint directory")
    for key, path in checkpoint_paths(config).items():
        try:
            checkpoints[key] = read_hf_config(path)
        except UserError as error:
            problems += [f"{key}: {line}" for line in str(error).splitlines()]
            continue
        problems += [f"{key}: {path}: {problem}" for problem in untrained(checkpoints[key])]
    return checkpoints, problems


def weight_files(config: Config, checkpoints: Mapping[str, HFConfig]) -> list[str]:
    """Return the errors in weight files of the checkpoints and in files that an export copies."""
    paths = {key: path for key, path in checkpoint_paths(config).items() if key in checkpoints}
    problems = [f"{key}: {problem}" for key, path in paths.items() for problem in _weight_files(Path(path))]
    if "model.path" in paths and (config.checkpoint.hf_final or config.checkpoint.hf_interval):
        try:
            companions(Path(paths["model.path"]))
        except UserError as error:
            problems.append(f"model.path: {error}")
    return problems


def check_pipeline(config: Config, checkpoints: Mapping[str, HFConfig]) -> Iterator[str]:
    """Yield the problems of uneven stages: their notation, their number, or the sum of their layers."""
    par, own = config.engine.megatron, has_own_layout(config)
    reference = "model.ref_path" if config.model.ref_path else "model.path"
    cut = [("engine.megatron", par, key) for key in checkpoints if not (own and key == "model.ref_path")]
    if own and reference in checkpoints:
        cut.append(("engine.megatron.reference", par.of_reference, reference))
    for section, sizes, key in cut:
        if sizes.pp == 1 or not sizes.pipeline:
            continue  # a rule of the config refuses the setting with one stage
        try:
            pipeline = parse_pipeline(sizes.pipeline)
            layout = ParallelLayout(world_size=sizes.pp, pp=sizes.pp, vpp=sizes.vpp, pipeline=pipeline)
            layout.layers_of(0, checkpoints[key].num_layers)
        except ValueError as error:
            yield f"{section}.pipeline: {key}: {error}"


def check_reference(config: Config, checkpoints: Mapping[str, HFConfig]) -> Iterator[str]:
    """Yield a problem if the reference is to take in the weights of an actor of another architecture."""
    interval, pair = config.algorithm.kl.reference_interval, ("model.path", "model.ref_path")
    if not interval or not all(key in checkpoints for key in pair):
        return
    actor, reference = (asdict(replace(checkpoints[key], raw={})) for key in pair)
    different = [name for name, value in actor.items() if reference[name] != value and name not in _NOT_COMPUTED]
    if different:
        sides = "; ".join(f"{name} {actor[name]} and {reference[name]}" for name in different[:3])
        yield (
            f"algorithm.kl.reference_interval={interval}: the reference takes in the actor's weights, but model.path "
            f"and model.ref_path differ in {sides}; name a reference of the actor's architecture, or set it to 0"
        )


def check_teacher(config: Config, checkpoints: Mapping[str, HFConfig]) -> Iterator[str]:
    """Yield a problem if student and teacher of a loss over the whole vocabulary have vocabularies of two sizes."""
    pair = [checkpoints[key] for key in ("model.path", "model.ref_path") if key in checkpoints]
    sizes = [checkpoint.vocab_size for checkpoint in pair]
    if LOSS.needs(config, "needs_teacher") and len(set(sizes)) == 2:
        yield (
            f"algorithm.loss={config.algorithm.loss}: a divergence goes over one vocabulary, but model.path has "
            f"{sizes[0]} entries and model.ref_path {sizes[1]}; take a teacher of the same size, or another loss with "
            "algorithm.advantage=distillation, which compares the sampled tokens alone"
        )


def tensor_shape(directory: Path, name: str) -> list[int] | None:
    """Return a tensor's shape from the header of its file; None if it is missing or the file is damaged."""
    file = directory / "model.safetensors"
    try:
        if not file.is_file():
            shard = read_json_object(directory / "model.safetensors.index.json")["weight_map"][name]
            if any(_indexed_shard(directory, shard)):
                return None
            file = directory / shard
        return list(read_entries(file)[name].shape)
    except (UserError, OSError, KeyError, TypeError):
        return None


def untrained(hf: HFConfig) -> Iterator[str]:
    """Yield why a model that can be converted cannot be trained: not shown to train, a known bug, quantized weights."""
    reason = FAMILIES[hf.family].not_trained
    if reason:
        yield (
            f"model_type={hf.family} can be converted (mega-rl convert) but not trained yet: {reason}; "
            f"trained are {', '.join(TRAINED)}"
        )
    bug = known_bug(hf)
    if bug is not None:
        yield (
            f"model_type={hf.family} cannot be trained with the installed transformers: rollouts would come from "
            f"another model, since {bug.what}; run 'pip install \"transformers>={bug.fixed_in}\"'"
        )
    if hf.quantization is not None:
        yield f"quantization_config: {hf.quantization} weights can be converted but not trained yet"


def _weight_files(directory: Path) -> Iterator[str]:
    """Yield the problems of the weight files, looked up as `mega_rl.storage.safetensors_reader` does."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        yield from _shard(single)
        return
    if not index.is_file():
        yield f"{directory}: holds neither {single.name} nor {index.name}; save the model again as safetensors"
        return
    try:
        names = set(read_json_object(index)["weight_map"].values())
    except (UserError, KeyError, TypeError, AttributeError):
        yield f"{index}: not an index of shards; it needs a 'weight_map' of tensor to file"
        return
    for name in sorted(names, key=str):
        yield from _indexed_shard(directory, name)


def _indexed_shard(directory: Path, name: object) -> Iterator[str]:
    if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts:
        yield f"{directory}: the index names {name!r}; legal: a file inside the checkpoint"
    elif not (directory / name).is_file():
        yield f"{directory / name}: missing, though the index names it; download or copy it again"
    else:
        yield from _shard(directory / name)


def _shard(path: Path) -> Iterator[str]:
    """Yield the problems of a file's header and size."""
    try:
        read_entries(path)
    except UserErrors as error:
        yield from error.problems
    except UserError as error:
        yield str(error)
