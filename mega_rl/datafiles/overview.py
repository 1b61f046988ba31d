"""Overview of the prompts of a recipe: its sets, what a run draws of each, and their first prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mega_rl.assemble.data import Tokens, load_data, read_tokens, with_length
from mega_rl.assemble.prompts.order import prompt_order
from mega_rl.assemble.prompts.stream import ONLY, stream_readers
from mega_rl.assemble.sources import load_data_source
from mega_rl.config.keys import with_settings
from mega_rl.config.loader import load
from mega_rl.config.rules import check
from mega_rl.config.schema import Config
from mega_rl.converters.hf.config import read_hf_config
from mega_rl.data.columns import RewardColumns
from mega_rl.data.sampling.mixture import shares_of
from mega_rl.errors import UserError, UserErrors
from mega_rl.hub.resolve import HubNames, checkpoint_folder, fetch, hub_names
from mega_rl.plan.preflight.run import check_data, check_validation
from mega_rl.plan.setup import smallest_world
from mega_rl.types import Prompt

LINE = 240  # characters of a prompt, or of an answer, that are shown: half from each end


@dataclass(frozen=True)
class SetOverview:
    """A set of prompts, and what a run draws of it; a stream is known by its first block alone."""

    name: str
    role: str  # "train" or "validation"
    prompts: int | None  # None of a stream
    mean_tokens: float
    longest: int  # tokens
    shards: int | None = None  # of a stream
    weight: float | None = None  # None where the number of prompts decides
    share: float | None = None  # of the run's draws
    draws: int | None = None
    epochs: float | None = None  # None of a stream


@dataclass(frozen=True)
class DataOverview:
    """All sets of a recipe."""

    steps: int
    draws: int  # prompts in all steps, without those that dynamic sampling adds
    sets: Sequence[SetOverview]
    first: Mapping[str, Sequence[Prompt]]  # by "role name"


def overview_lines(recipe: Path, overrides: Sequence[str], *, prompts: int, as_json: bool) -> Iterator[str]:
    """Yield the overview of a recipe as text, with so many prompts of each set. Raises UserErrors."""
    config, tokens, vocab_size = _inputs(recipe, overrides)
    overview = _overview(config, tokens, vocab_size, prompts)
    if as_json:
        first = {name: [_shown(prompt, tokens, None) for prompt in own] for name, own in overview.first.items()}
        record = {"steps": overview.steps, "draws": overview.draws, "first": first}
        yield json.dumps(record | {"sets": [asdict(one) for one in overview.sets]}, indent=2, ensure_ascii=False)
        return
    yield from _table(overview.sets)
    yield f"{overview.steps:,} steps of {config.trainer.prompts_per_step:,} prompts are {overview.draws:,} draws"
    if config.rollout.dynamic_sampling.max_generations:
        yield "dynamic sampling draws more: groups of equal rewards are replaced"
    if (prefer := config.data.curriculum.success.prefer) != "none":
        yield f"within a set prompts are drawn by their success: {prefer} ones more often"
    for name, own in overview.first.items():
        yield ""
        yield f"{name}:"
        for number, prompt in enumerate(own, start=1):
            shown = _shown(prompt, tokens, LINE)
            yield f"  {number}. {shown['prompt']}"
            yield f"     last token ids: {' '.join(map(str, prompt.token_ids[-10:]))}"
            yield f"     answer: {shown['answer']}"


def _inputs(recipe: Path, overrides: Sequence[str]) -> tuple[Config, Tokens, int]:
    """Return the config with local data files, the tokenizer and the model's vocabulary. Raises UserErrors."""
    config = load(recipe, overrides)
    if problems := check(config, world_size=smallest_world(config)):
        raise UserErrors(problems)
    if not config.model.path:
        raise UserError("model.path is empty: name a folder with a config.json, or a model of the Hub")
    data = HubNames({}, hub_names(config).data)
    config = fetch(config, data, admit=lambda _: None) if data else config
    folder = checkpoint_folder(config.model.path, label="model.path", weights=False)
    config = with_settings(config, {"model.path": str(folder)})
    if problems := [*check_data(config.data), *check_validation(config.validation, config.data)]:
        raise UserErrors(problems)
    vocab_size = read_hf_config(folder).vocab_size
    return config, read_tokens(config, is_writer=False), vocab_size


def _overview(config: Config, tokens: Tokens, vocab_size: int, prompts: int) -> DataOverview:
    columns = RewardColumns(answer=False, structured=True)  # whatever the reward reads
    source = load_data_source(config)
    train, held_out = load_data(config, tokens, vocab_size=vocab_size, columns=columns, source=source)
    first: dict[str, Sequence[Prompt]] = {}
    if config.data.stream.rows:
        sets = _streams(config, tokens, vocab_size, columns, first)
    else:
        config = with_length(config, len(train), world_size=smallest_world(config))
        sets = _in_memory(config, train, first)
    for one in held_out:
        name = one.name or "validation"
        sets.append(_of_prompts(name, "validation", one.prompts))
        first[f"{one.name} (validation)" if one.name else name] = one.prompts
    draws = config.trainer.steps * config.trainer.prompts_per_step
    return DataOverview(config.trainer.steps, draws, sets, {name: own[:prompts] for name, own in first.items()})


def _in_memory(config: Config, train: Sequence[Prompt], first: dict[str, Sequence[Prompt]]) -> list[SetOverview]:
    """Return the sets of training prompts; `first` gets the prompts of each in the order of the files."""
    order = prompt_order(config, train).steps
    drawn = order.drawn_after(config.trainer.steps)
    metrics = order.metrics(drawn)
    sets, sources = [], config.data.mixture.named()
    for name in sources:
        own = [prompt for prompt in train if prompt.source == name]
        count = int(metrics[f"data/{name}/prompts"])
        first[name] = own
        one = _of_prompts(name, "train", own)
        weight = sources[name].weight or None
        epochs = metrics[f"data/{name}/epochs"]
        sets.append(replace(one, weight=weight, share=count / drawn, draws=count, epochs=epochs))
    if not sources:
        first["train"] = train
    whole = _of_prompts("all" if sources else "train", "train", train)
    return [*sets, replace(whole, share=1.0, draws=drawn, epochs=metrics["data/epochs"])]


def _streams(
    config: Config, tokens: Tokens, vocab_size: int, columns: RewardColumns, first: dict[str, Sequence[Prompt]]
) -> list[SetOverview]:
    """Return the streams of training prompts, of each the first block."""
    sources = config.data.mixture.named()
    shares = shares_of({name: source.weight for name, source in sources.items()}) if sources else {ONLY: 1}
    drawn, sets = config.trainer.steps * config.trainer.prompts_per_step, []
    for name, reader in stream_readers(config, tokens, vocab_size, columns):
        first[name or "train"] = own = reader.first_block()
        share = shares[name] / sum(shares.values())
        one = _of_prompts(name or "train", "train", own)
        weight = sources[name].weight if name else None
        streamed = replace(one, prompts=None, shards=len(reader.shards), weight=weight, share=share)
        sets.append(replace(streamed, draws=round(share * drawn)))
    return sets


def _of_prompts(name: str, role: str, prompts: Sequence[Prompt]) -> SetOverview:
    lengths = [len(prompt.token_ids) for prompt in prompts]
    return SetOverview(name, role, len(prompts), sum(lengths) / max(len(lengths), 1), max(lengths, default=0))


def _table(sets: Sequence[SetOverview]) -> Iterator[str]:
    """Yield the sets as aligned columns."""
    head = ["set", "prompts", "mean tokens", "longest", "weight", "share", "draws", "epochs"]
    rows = [head]
    for one in sets:
        size = f"{one.shards} shard{'s' * (one.shards != 1)}" if one.prompts is None else f"{one.prompts:,}"
        weight = "" if one.weight is None else f"{one.weight:g}"
        share = "" if one.share is None else f"{one.share:.1%}"
        draws = "" if one.draws is None else f"{one.draws:,}"
        epochs = "" if one.epochs is None else f"{one.epochs:.3g}"
        rows.append([one.name, size, f"{one.mean_tokens:.0f}", str(one.longest), weight, share, draws, epochs])
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        yield "  ".join(cells).rstrip()


def _shown(prompt: Prompt, tokens: Tokens, limit: int | None) -> dict[str, object]:
    """Return prompt, as the model sees it, its last ids, and answer; with a limit as lines, cut in the middle."""
    answer = prompt.answer if isinstance(prompt.answer, str) else json.dumps(prompt.answer, ensure_ascii=False)
    texts = {"prompt": tokens.render(prompt.token_ids), "answer": answer}
    if limit is not None:
        lines = {name: text.replace("\n", "\\n") for name, text in texts.items()}
        half = limit // 2
        texts = {
            name: line if len(line) <= limit else f"{line[:half]} [...] {line[-half:]}" for name, line in lines.items()
        }
    return {**texts, "last_token_ids": prompt.token_ids[-10:]}
