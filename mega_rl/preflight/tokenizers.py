"""Tokenizers: whole, no larger than their models, and the actor's for every model that reads the actor's tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from mega_rl.config.schema import Config
from mega_rl.converters.architecture import HFConfig
from mega_rl.data.tokenizer_identity import TOKENIZER_FILES, TokenizerIdentity, read_json_object, read_tokenizer
from mega_rl.errors import UserError
from mega_rl.preflight.checkpoints import checkpoint_paths

ACTOR, REWARD = "model.path", "reward.model_path"


def check_tokenizers(config: Config, checkpoints: Mapping[str, HFConfig]) -> Iterator[str]:
    """What is wrong with the tokenizers of the checkpoints.

    Actor and reward model need one; reference and critic read the actor's tokens, so theirs must give the same ids.
    """
    paths = {key: Path(path) for key, path in checkpoint_paths(config).items() if key in checkpoints}
    found: dict[str, TokenizerIdentity | None] = {}
    for key, path in paths.items():
        try:
            found[key] = read_tokenizer(path)
        except UserError as error:
            yield f"{key}: {error}"
            continue
        yield from (f"{key}: {path}: {problem}" for problem in _fits_model(found[key], key, checkpoints[key]))
    for key in (key for key in (ACTOR, REWARD) if found.get(key) is not None):
        needs_template = key == ACTOR and config.data.chat_template
        yield from (f"{key}: {problem}" for problem in _settings(paths[key], needs_template=needs_template))
    actor = found.get(ACTOR)
    for key in ("model.ref_path", "model.critic_path"):
        if actor is not None and key in found:
            sizes = (checkpoints[key].vocab_size, checkpoints[ACTOR].vocab_size)
            yield from _is_actors(found[key], actor, key=key, folders=(paths[key], paths[ACTOR]), vocab_sizes=sizes)


def _fits_model(tokenizer: TokenizerIdentity | None, key: str, hf: HFConfig) -> Iterator[str]:
    if tokenizer is None:
        if key in (ACTOR, REWARD):
            yield f"no tokenizer; it needs one of {', '.join(TOKENIZER_FILES)}"
    elif tokenizer.largest_id >= hf.vocab_size:
        yield (
            f"the tokenizer has token id {tokenizer.largest_id}, the model a vocabulary of {hf.vocab_size}; "
            "they do not belong together"
        )


def _settings(directory: Path, *, needs_template: bool) -> Iterator[str]:
    try:
        settings = read_json_object(directory / "tokenizer_config.json")
    except UserError as error:
        yield str(error)
        return
    has_template = "chat_template" in settings or (directory / "chat_template.jinja").is_file()
    if needs_template and not has_template:
        yield f"{directory}: the tokenizer has no chat template; set data.chat_template=false"


def _is_actors(
    tokenizer: TokenizerIdentity | None,
    actor: TokenizerIdentity,
    *,
    key: str,
    folders: tuple[Path, Path],
    vocab_sizes: tuple[int, int],
) -> Iterator[str]:
    """Whether a model's tokenizer is the actor's; sizes and folders are the model's, then the actor's."""
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
