"""Checks of checkpoints: an architecture that can be trained, complete weight files, tokenizers that fit together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from packaging.version import Version

from mega_rl.config.choices import LOSS
from mega_rl.config.schema import ChatConfig, Config, DataConfig
from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.families import FAMILIES, KnownBug
from mega_rl.converters.hf.companions import companions
from mega_rl.converters.hf.config import read_hf_config, release_problems
from mega_rl.converters.plan.parameters import adapter_problems
from mega_rl.converters.safetensors.header import checkpoint_entries
from mega_rl.data.downloads import checkpoint_paths
from mega_rl.data.tokenizer_identity import TOKENIZER_FILES, TokenizerIdentity, read_json_object, read_tokenizer
from mega_rl.errors import UserError
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.plan.setup import models_of

ACTOR, REFERENCE, CRITIC, REWARD = "model.path", "model.ref_path", "model.critic_path", "reward.source.path"
# Properties of a checkpoint that its forward does not depend on.
_NOT_COMPUTED = ("dtype", "initializer_range", "prefixes", "quantization")


def read_checkpoints(config: Config) -> tuple[dict[str, HFConfig], list[str]]:
    """Return the architecture of every readable checkpoint, by config key, and the problems of the others."""
    checkpoints: dict[str, HFConfig] = {}
    problems: list[str] = []
    if not config.model.path:
        problems.append("model.path is empty: name a Hugging Face checkpoint directory")
    for key, path in checkpoint_paths(config).items():
        try:
            checkpoints[key] = read_hf_config(path, any_model=config.engine.backend == "fsdp")
        except UserError as error:
            problems += [f"{key}: {line}" for line in str(error).splitlines()]
            continue
        problems += [f"{key}: {path}: {problem}" for problem in untrained(checkpoints[key])]
        if config.engine.backend == "megatron":
            problems += [f"{key}: {path}: {problem}" for problem in release_problems(checkpoints[key].family)]
    return checkpoints, problems


def untrained(hf: HFConfig) -> Iterator[str]:
    """Yield why a model cannot be trained: a known bug."""
    bug = None if hf.own is not None else known_bug(hf)
    if bug is not None:
        yield (
            f"model_type={hf.family} cannot be trained with the installed transformers: rollouts would come from "
            f"another model, since {bug.what}; run 'pip install \"transformers>={bug.fixed_in}\"'"
        )


def known_bug(hf: HFConfig, *, transformers: str | None = None) -> KnownBug | None:
    """Return why a release of transformers computes wrong logits; None if no bug is known."""
    release = Version(transformers or version("transformers"))
    bugs = FAMILIES[hf.family].known_bugs
    return next((bug for bug in bugs if release < Version(bug.fixed_in) and bug.concerns(hf)), None)


def check_weight_files(config: Config, checkpoints: Mapping[str, HFConfig]) -> Iterator[str]:
    """Yield the errors in weight files of the checkpoints and in files that an export copies."""
    paths = {key: Path(path) for key, path in checkpoint_paths(config).items() if key in checkpoints}
    for key, path in paths.items():
        try:
            checkpoint_entries(path)
        except UserError as error:
            yield from (f"{key}: {line}" for line in str(error).splitlines())
    if ACTOR in paths and (config.checkpoint.hf_final or config.checkpoint.hf_interval):
        try:
            companions(paths[ACTOR])
        except UserError as error:
            yield f"{ACTOR}: {error}"


def check_reference(config: Config, checkpoints: Mapping[str, HFConfig]) -> Iterator[str]:
    """Yield why a reference cannot take in the actor's weights, or cannot teach it."""
    if not all(key in checkpoints for key in (ACTOR, REFERENCE)):
        return
    actor, reference = (asdict(replace(checkpoints[key], raw={}, wrapper=None)) for key in (ACTOR, REFERENCE))
    different = [name for name, value in actor.items() if reference[name] != value and name not in _NOT_COMPUTED]
    if config.algorithm.kl.reference_interval and different:
        yield (
            f"algorithm.kl.reference_interval={config.algorithm.kl.reference_interval}: the reference takes in the "
            f"actor's weights, but model.path and model.ref_path differ in {', '.join(different[:3])}; name a "
            "reference of the actor's architecture, or set it to 0"
        )
    if LOSS.needs(config, "needs_teacher") and any(checkpoints[key].own is not None for key in (ACTOR, REFERENCE)):
        yield (
            f"algorithm.loss={config.algorithm.loss}: reads logits off the last hidden states: proved for families "
            "with a table; take a model of such a family, or another loss"
        )
    if LOSS.needs(config, "needs_teacher") and "vocab_size" in different:
        yield (
            f"algorithm.loss={config.algorithm.loss}: a divergence goes over one vocabulary, but model.path and "
            "model.ref_path differ in its size; take a teacher of the same size, or another loss"
        )


def check_adapters(config: Config, checkpoints: Mapping[str, HFConfig], world_size: int) -> Iterator[str]:
    """Yield why the models that train cannot have the adapters of `model.adapter`."""
    if not config.model.adapter.rank or "model.path" not in checkpoints:
        return
    try:
        for role, model in models_of(config, checkpoints).items():
            layout = ParallelLayout.of_engine(
                config.engine, world_size=world_size, has_experts=model.hf.moe is not None
            )
            yield from (f"{role}: {problem}" for problem in adapter_problems(model.hf, layout))
    except ValueError as error:
        yield from str(error).splitlines()


def check_tokenizers(config: Config, checkpoints: Mapping[str, HFConfig]) -> Iterator[str]:
    """Yield the problems of the checkpoints' tokenizers."""
    paths = {key: Path(path) for key, path in checkpoint_paths(config).items() if key in checkpoints}
    tokenizers: dict[str, TokenizerIdentity | None] = {}
    for key, path in paths.items():
        try:
            tokenizers[key] = tokenizer = read_tokenizer(path)
        except UserError as error:
            yield f"{key}: {error}"
            continue
        size = checkpoints[key].vocab_size
        if tokenizer is None and key in (ACTOR, REWARD):
            yield f"{key}: {path}: no tokenizer; it needs one of {', '.join(TOKENIZER_FILES)}"
        elif tokenizer is not None and tokenizer.largest_id >= size:
            yield (
                f"{key}: {path}: the tokenizer has token id {tokenizer.largest_id}, the model a vocabulary of {size}; "
                "they do not belong together"
            )
    for key in (key for key in (ACTOR, REWARD) if tokenizers.get(key) is not None):
        yield from (f"{key}: {problem}" for problem in _settings(paths[key], config.data if key == ACTOR else None))
    actor = tokenizers.get(ACTOR)
    for key in (key for key in (REFERENCE, CRITIC) if actor is not None and key in tokenizers):
        tokenizer = tokenizers[key]
        difference = "" if tokenizer is None or actor is None else tokenizer.difference(actor)
        sizes = [checkpoints[each].vocab_size for each in (key, ACTOR)]
        if not difference and sizes[0] != sizes[1] and (tokenizer is None or not tokenizer.tokens):
            # Without a list of tokens the padding of a larger vocabulary is unknown.
            difference = f"it has a vocabulary of {sizes[0]}, model.path one of {sizes[1]}"
        if difference:
            yield (
                f"{key}: {paths[key]}: its tokenizer is not that of model.path ({paths[ACTOR]}): {difference}; it "
                "reads the actor's tokens, so take a checkpoint with the same tokenizer"
            )


def _settings(directory: Path, data: DataConfig | None) -> Iterator[str]:
    """Yield the problems of tokenizer_config.json, and of the chat template if `data` uses it."""
    try:
        settings = read_json_object(directory / "tokenizer_config.json")
    except UserError as error:
        yield str(error)
        return
    if data is None or data.chat.template != "true":
        return
    template = _template(directory, settings, tools="tools" in data.chat.template_kwargs)
    if template is None:
        yield f"{directory}: the tokenizer has no chat template; set data.chat.template=auto"
        return
    sections = {"data.chat": data.chat}
    for name, source in data.mixture.named().items():
        sections[f"data.mixture.sources.{name}"] = ChatConfig(template_kwargs=source.template_kwargs)
    for section, chat in sections.items():
        yield from _variables(directory, template, chat, section)


def _template(directory: Path, settings: Mapping[str, Any], *, tools: bool) -> str | None:
    """Return the chat template that transformers takes, a file before the settings; None without a template."""
    file = directory / "additional_chat_templates" / "tool_use.jinja"
    if not tools or not file.is_file():
        file = directory / "chat_template.jinja"
    template = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else settings.get("chat_template")
    if isinstance(template, list):  # entries {"name", "template"}
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("tool_use", named.get("default")) if tools else named.get("default")
    return template if isinstance(template, str) else None


def _variables(directory: Path, template: str, chat: ChatConfig, section: str) -> Iterator[str]:
    """Yield variables that the template does not read, and a date that it does not write."""
    import jinja2

    from mega_rl.data.chat import template_variables, writes_date

    try:
        known, dated = template_variables(template), writes_date(template)
    except jinja2.TemplateSyntaxError:
        return  # the tokenizer's own reader has the last word, row by row
    try:
        usable = not chat.date or (bool(date.fromisoformat(chat.date)) and dated)
    except ValueError:
        usable = False
    if not usable:
        yield f"data.chat.date={chat.date!r}: write it as 2026-01-31, for a chat template that writes the date"
    for name in sorted(set(chat.template_kwargs) - known):
        legal = ", ".join(sorted(known)) or "none"
        yield f"{section}.template_kwargs.{name}: the chat template in {directory} reads no {name}; legal: {legal}"
