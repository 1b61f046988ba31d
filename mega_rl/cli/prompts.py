"""`mega-rl data show`: a recipe's sets of prompts, a run's draws from them, first prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import typer

from mega_rl.cli.output import print_table
from mega_rl.config.choices import DATA, kind_of_run
from mega_rl.config.keys import with_settings
from mega_rl.config.loader import load
from mega_rl.config.rules import check
from mega_rl.config.schema import Config, DataConfig, SuccessCurriculum, TrainerConfig
from mega_rl.converters.hf.config import read_hf_config
from mega_rl.data.build import ONLY, PromptReader, build_order
from mega_rl.data.columns import RewardColumns
from mega_rl.data.downloads import HubNames, checkpoint_folder, fetch, hub_names
from mega_rl.data.order import shares_of
from mega_rl.errors import UserError, UserErrors
from mega_rl.plan.preflight import check_data
from mega_rl.plan.setup import smallest_world
from mega_rl.tracking.progress import printable
from mega_rl.trainer.assemble.data import OwnRows, Tokens, load_data, prompt_reader, read_tokens, with_length
from mega_rl.types import Prompt

LINE = 240  # characters of a prompt, or of an answer, that are shown: half from each end
HEAD = ("set", "prompts", "mean tokens", "longest", "weight", "share", "draws", "epochs")
# (cells of a set, title of its prompts ("": none shown), its prompts).
Sets: TypeAlias = Iterator[tuple[list[str], str, Sequence[Prompt]]]


def show_prompts(recipe: Path, overrides: Sequence[str], *, prompts: int) -> None:
    """Print the overview of a recipe, with the first `prompts` of each set. Raises UserErrors."""
    config, tokens, vocab_size = _inputs(recipe, overrides)
    data, source = config.data, config.data.source_key if config.reward.sources else ""
    columns = RewardColumns(answer=False, structured=True, source=source)  # any reward
    make, validates = DATA.maker(config), config.trainer.val_interval > 0 and DATA.needs(config, "has_validation")
    rows = make and OwnRows(make, data.source.name, config.trainer.seed, validates)
    reader, seed = prompt_reader(kind_of_run(config), data, tokens, columns, vocab_size=vocab_size), config.trainer.seed
    train, held_out = load_data(reader, config.validation.sets, tokens, seed=seed, source=rows)
    if data.stream.rows:
        sets = [*_streams(config.trainer, reader)]
    else:
        warmup = config.optim.warmup_steps + config.algorithm.critic_warmup_steps
        config = replace(config, trainer=with_length(config.trainer, len(train), warmup=warmup))
        sets = [*_in_memory(data, config.trainer, train)]
    for one in held_out:
        title = f"{one.name} (validation)" if one.name else "validation"
        sets.append((_cells(one.name or "validation", one.prompts), title, one.prompts))
    steps, draws = config.trainer.steps, config.trainer.steps * config.trainer.prompts_per_step
    print_table(HEAD, [cells for cells, _, _ in sets])
    typer.echo(f"{steps:,} steps of {config.trainer.prompts_per_step:,} prompts are {draws:,} draws")
    if config.rollout.dynamic_sampling.max_generations:
        typer.echo("dynamic sampling draws more: groups of equal rewards are replaced")
    if isinstance(success := config.data.curriculum, SuccessCurriculum):
        typer.echo(f"within a set prompts are drawn by their success: {success.prefer} ones more often")
    for title, own in ((title, own) for _, title, own in sets if title):
        typer.echo(f"\n{title}:")
        for number, prompt in enumerate(own[:prompts], start=1):
            answer = prompt.answer if isinstance(prompt.answer, str) else json.dumps(prompt.answer, ensure_ascii=False)
            typer.echo(f"  {number}. {_cut(tokens.render(prompt.token_ids))}")
            typer.echo(f"     last token ids: {' '.join(map(str, prompt.token_ids[-10:]))}")
            if not prompt.given:
                typer.echo(f"     answer: {_cut(answer)}")
            for given in prompt.given:
                trained = [tokens.render(given.token_ids[first:end]) for first, end in given.spans]
                typer.echo(f"     trains: {_cut(' | '.join(trained))}")


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
    if problems := list(check_data(config)):
        raise UserErrors(problems)
    skips = config.reward.skip_special_tokens
    tokens = read_tokens(folder, config.data.chat, config.rollout, skip_special_tokens=skips)
    return config, tokens, read_hf_config(folder, any_model=True).vocab_size


def _in_memory(data: DataConfig, trainer: TrainerConfig, train: Sequence[Prompt]) -> Sets:
    """Yield the sources of training prompts in the order of the files, then the whole."""
    order, _ = build_order(data, trainer, train)
    drawn = order.drawn_after(trainer.steps)
    metrics = order.metrics(drawn)
    sources = data.mixture.named()
    for name, source in sources.items():
        own = [prompt for prompt in train if prompt.source == name]
        count = int(metrics[f"data/{name}/prompts"])
        draws = (source.weight or None, count / drawn, count, metrics[f"data/{name}/epochs"])
        yield _cells(name, own, *draws), name, own
    whole = (None, 1.0, drawn, metrics["data/epochs"])
    yield _cells("all" if sources else "train", train, *whole), "" if sources else "train", train


def _streams(trainer: TrainerConfig, of_run: PromptReader) -> Sets:
    """Yield the streams of training prompts, each with its first block."""
    weights = {name: source.weight for name, source in of_run.data.mixture.named().items()}
    shares = shares_of(weights) if weights else {ONLY: 1}
    drawn = trainer.steps * trainer.prompts_per_step
    for name, reader in of_run.streams(trainer.seed):
        title, own = name or "train", reader.first_block()
        share = shares[name] / sum(shares.values())
        cells = _cells(title, own, weights.get(name), share, round(share * drawn))
        cells[1] = f"{len(reader.shards)} shard{'s' * (len(reader.shards) != 1)}"
        yield cells, title, own


def _cells(name: str, own: Sequence[Prompt], *draws: float | None) -> list[str]:
    """Return the cells of a set. draws: its weight, share, draws and epochs if it trains."""
    lengths = [len(prompt.token_ids) for prompt in own] or [0]
    cells = [name, f"{len(own):,}", f"{sum(lengths) / len(lengths):.0f}", str(max(lengths))]
    formats = ("{:g}", "{:.1%}", "{:,}", "{:.3g}")
    cells += ["" if value is None else text.format(value) for value, text in zip(draws, formats, strict=False)]
    return [*cells, *[""] * (len(HEAD) - len(cells))]


def _cut(text: str) -> str:
    """Return a text as one line, cut in the middle."""
    line = text.replace("\n", "\\n")
    half = LINE // 2
    return printable(line if len(line) <= LINE else f"{line[:half]} [...] {line[-half:]}")
