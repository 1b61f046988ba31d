"""Checks of tokenizers: readable, no larger than their models, and equal for models that share the actor's tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

from mega_rl.config.schema import ChatConfig, Config, DataConfig
from mega_rl.converters.architecture import HFConfig
from mega_rl.data.tokenizer_identity import TOKENIZER_FILES, TokenizerIdentity, read_json_object, read_tokenizer
from mega_rl.errors import UserError
from mega_rl.preflight.checkpoints import checkpoint_paths

ACTOR, REWARD = "model.path", "reward.model.path"


def check_tokenizers(config: Config, checkpoints: Mapping[str, HFConfig]) -> Iterator[str]:
    """Yield the problems of the checkpoints' tokenizers.

    Actor and reward model need one; reference and critic read the actor's tokens, so theirs must give the same ids.
    """
    paths = {key: Path(path) for key, path in checkpoint_paths(config).items() if key in checkpoints}
    tokenizers: dict[str, TokenizerIdentity | None] = {}
    for key, path in paths.items():
        try:
            tokenizers[key] = read_tokenizer(path)
        except UserError as error:
            yield f"{key}: {error}"
            continue
        yield from (f"{key}: {path}: {problem}" for problem in _fits_model(tokenizers[key], key, checkpoints[key]))
    for key in (key for key in (ACTOR, REWARD) if tokenizers.get(key) is not None):
        yield from (f"{key}: {problem}" for problem in _settings(paths[key], config.data if key == ACTOR else None))
    actor = tokenizers.get(ACTOR)
    for key in ("model.ref_path", "model.critic_path"):
        if actor is not None and key in tokenizers:
            sizes = (checkpoints[key].vocab_size, checkpoints[ACTOR].vocab_size)
            yield from _same_tokenizer(
                tokenizers[key], actor, key=key, folders=(paths[key], paths[ACTOR]), vocab_sizes=sizes
            )


def _fits_model(tokenizer: TokenizerIdentity | None, key: str, hf: HFConfig) -> Iterator[str]:
    if tokenizer is None:
        if key in (ACTOR, REWARD):
            yield f"no tokenizer; it needs one of {', '.join(TOKENIZER_FILES)}"
    elif tokenizer.largest_id >= hf.vocab_size:
        yield (
            f"the tokenizer has token id {tokenizer.largest_id}, the model a vocabulary of {hf.vocab_size}; "
            "they do not belong together"
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
    else:
        yield from _variables(directory, template, data.chat)
        for name, source in data.mixture.named().items():
            own = ChatConfig(template_kwargs=source.template_kwargs)
            yield from _variables(directory, template, own, section=f"data.mixture.sources.{name}")


def _template(directory: Path, settings: Mapping[str, Any], *, tools: bool) -> str | None:
    """Return the chat template that transformers takes, a file before the settings; None where there is none."""
    file = directory / "additional_chat_templates" / "tool_use.jinja"
    if not tools or not file.is_file():
        file = directory / "chat_template.jinja"
    template = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else settings.get("chat_template")
    if isinstance(template, list):  # of {"name", "template"}
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("tool_use", named.get("default")) if tools else named.get("default")
    return template if isinstance(template, str) else None


def _variables(directory: Path, template: str, chat: ChatConfig, *, section: str = "data.chat") -> Iterator[str]:
    """Yield the variables that the template does not read, or that the run sets itself, and an unusable date."""
    import jinja2

    from mega_rl.data.chat import OWN, template_variables, writes_date

    try:
        if chat.date:
            date.fromisoformat(chat.date)
    except ValueError:
        yield f"data.chat.date={chat.date!r}: is not a date; write it as {date.today().isoformat()}"
    try:
        known, dated = template_variables(template), writes_date(template)
    except jinja2.TemplateSyntaxError:
        return  # the tokenizer's own reader has the last word, row by row
    if chat.date and not dated:
        yield f"data.chat.date={chat.date!r}: the chat template in {directory} writes no date; leave it out"
    for name in chat.template_kwargs:
        if name in OWN:
            yield f"{section}.template_kwargs.{name}: is set by the run itself; remove it"
        elif name not in known:
            legal = ", ".join(sorted(known)) or "none"
            yield f"{section}.template_kwargs.{name}: the chat template in {directory} reads no {name}; legal: {legal}"


def _same_tokenizer(
    tokenizer: TokenizerIdentity | None,
    actor: TokenizerIdentity,
    *,
    key: str,
    folders: tuple[Path, Path],
    vocab_sizes: tuple[int, int],
) -> Iterator[str]:
    """Yield how a model's tokenizer differs from the actor's; folders and sizes: the model's, then the actor's."""
    difference = "" if tokenizer is None else tokenizer.difference(actor)
    if difference:
        yield (
            f"{key}: {folders[0]}: its tokenizer is not that of model.path ({folders[1]}): {difference}; it reads the "
            "actor's tokens, so take a checkpoint with the same tokenizer"
        )
    elif vocab_sizes[0] != vocab_sizes[1] and (tokenizer is None or not tokenizer.tokens):
        # No list of tokens says how much of a larger vocabulary is padding.
        yield (
            f"{key} has a vocabulary of {vocab_sizes[0]}, model.path one of {vocab_sizes[1]}; "
            "they must share the tokenizer"
        )
