"""`mega-rl data show`: a recipe's sets of prompts, a run's draws from them, first prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import typer

from mega_rl.cli.text.tables import print_table
from mega_rl.config.keys import with_settings
from mega_rl.config.loader import load
from mega_rl.config.rules import check
from mega_rl.config.schema import Config, SuccessCurriculum
from mega_rl.converters.hf.config import read_hf_config
from mega_rl.data.columns import RewardColumns
from mega_rl.data.hub.resolve import HubNames, checkpoint_folder, fetch, hub_names
from mega_rl.data.sampling.mixture import shares_of
from mega_rl.errors import UserError, UserErrors
from mega_rl.plan.preflight.run import check_data, check_validation
from mega_rl.plan.setup import smallest_world
from mega_rl.tracking.progress import printable
from mega_rl.trainer.assemble.data import Tokens, load_data, read_tokens, with_length
from mega_rl.trainer.assemble.prompts.order import prompt_order
from mega_rl.trainer.assemble.prompts.stream import ONLY, stream_readers
from mega_rl.trainer.assemble.sources import load_data_source
from mega_rl.types import Prompt

LINE = 240  # characters of a prompt, or of an answer, that are shown: half from each end
HEAD = ("set", "prompts", "mean tokens", "longest", "weight", "share", "draws", "epochs")


@dataclass(frozen=True)
class SetOverview:
    """A set of prompts and a run's draws from it; a stream is known by its first block."""

    name: str
    role: str  # "train" or "validation"
    prompts: int | None  # None for a stream
    mean_tokens: float
    longest: int  # tokens
    shards: int | None = None  # shards of a stream
    weight: float | None = None  # None where the number of prompts decides
    share: float | None = None  # share of the run's draws
    draws: int | None = None
    epochs: float | None = None  # None for a stream

    def cells(self) -> list[str]:
        """Return the cells of the table; empty for None."""
        size = f"{self.shards} shard{'s' * (self.shards != 1)}" if self.prompts is None else f"{self.prompts:,}"
        formats = ((self.weight, "{:g}"), (self.share, "{:.1%}"), (self.draws, "{:,}"), (self.epochs, "{:.3g}"))
        draws = ["" if value is None else text.format(value) for value, text in formats]
        return [self.name, size, f"{self.mean_tokens:.0f}", str(self.longest), *draws]


Sets = Iterator[tuple[SetOverview, str, Sequence[Prompt]]]  # with the title of the prompts ("": none shown), and these


def show_prompts(recipe: Path, overrides: Sequence[str], *, prompts: int, as_json: bool) -> None:
    """Print the overview of a recipe, with the first `prompts` of each set. Raises UserErrors."""
    config, tokens, vocab_size = _inputs(recipe, overrides)
    columns = RewardColumns(answer=False, structured=True)  # any reward
    source = load_data_source(config)
    train, held_out = load_data(config, tokens, vocab_size=vocab_size, columns=columns, source=source)
    if config.data.stream.rows:
        sets = [*_streams(config, tokens, vocab_size, columns)]
    else:
        config = with_length(config, len(train), world_size=smallest_world(config))
        sets = [*_in_memory(config, train)]
    for one in held_out:
        title = f"{one.name} (validation)" if one.name else "validation"
        sets.append((_of_prompts(one.name or "validation", "validation", one.prompts), title, one.prompts))
    steps, draws = config.trainer.steps, config.trainer.steps * config.trainer.prompts_per_step
    first = {title: [_shown(prompt, tokens) for prompt in own[:prompts]] for _, title, own in sets if title}
    if as_json:
        keys = ("prompt", "answer", "last_token_ids")
        shown = {title: [dict(zip(keys, one, strict=True)) for one in own] for title, own in first.items()}
        facts = {"steps": steps, "draws": draws, "first": shown, "sets": [asdict(one) for one, _, _ in sets]}
        typer.echo(json.dumps(facts, indent=2, ensure_ascii=False))
        return
    print_table(HEAD, [one.cells() for one, _, _ in sets])
    typer.echo(f"{steps:,} steps of {config.trainer.prompts_per_step:,} prompts are {draws:,} draws")
    if config.rollout.dynamic_sampling.max_generations:
        typer.echo("dynamic sampling draws more: groups of equal rewards are replaced")
    if isinstance(success := config.data.curriculum, SuccessCurriculum):
        typer.echo(f"within a set prompts are drawn by their success: {success.prefer} ones more often")
    for name, own in first.items():
        typer.echo(f"\n{name}:")
        for number, (prompt, answer, last) in enumerate(own, start=1):
            typer.echo(f"  {number}. {_cut(prompt)}")
            typer.echo(f"     last token ids: {' '.join(map(str, last))}")
            typer.echo(f"     answer: {_cut(answer)}")


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
    return config, read_tokens(config, is_writer=False), read_hf_config(folder).vocab_size


def _in_memory(config: Config, train: Sequence[Prompt]) -> Sets:
    """Yield the sources of training prompts in the order of the files, then the whole."""
    order = prompt_order(config, train).steps
    drawn = order.drawn_after(config.trainer.steps)
    metrics = order.metrics(drawn)
    sources = config.data.mixture.named()
    for name, source in sources.items():
        own = [prompt for prompt in train if prompt.source == name]
        count, epochs = int(metrics[f"data/{name}/prompts"]), metrics[f"data/{name}/epochs"]
        one = replace(_of_prompts(name, "train", own), weight=source.weight or None)
        yield replace(one, share=count / drawn, draws=count, epochs=epochs), name, own
    whole = _of_prompts("all" if sources else "train", "train", train)
    whole = replace(whole, share=1.0, draws=drawn, epochs=metrics["data/epochs"])
    yield whole, "" if sources else "train", train


def _streams(config: Config, tokens: Tokens, vocab_size: int, columns: RewardColumns) -> Sets:
    """Yield the streams of training prompts, each with its first block."""
    sources = config.data.mixture.named()
    shares = shares_of({name: source.weight for name, source in sources.items()}) if sources else {ONLY: 1}
    drawn = config.trainer.steps * config.trainer.prompts_per_step
    for name, reader in stream_readers(config, tokens, vocab_size, columns):
        title, own = name or "train", reader.first_block()
        share = shares[name] / sum(shares.values())
        one = replace(_of_prompts(title, "train", own), prompts=None, shards=len(reader.shards))
        weight = sources[name].weight if name else None
        yield replace(one, weight=weight, share=share, draws=round(share * drawn)), title, own


def _of_prompts(name: str, role: str, own: Sequence[Prompt]) -> SetOverview:
    lengths = [len(prompt.token_ids) for prompt in own]
    return SetOverview(name, role, len(own), sum(lengths) / max(len(lengths), 1), max(lengths, default=0))


def _shown(prompt: Prompt, tokens: Tokens) -> tuple[str, str, Sequence[int]]:
    """Return the prompt as the model sees it, the answer, and the prompt's last token ids."""
    answer = prompt.answer if isinstance(prompt.answer, str) else json.dumps(prompt.answer, ensure_ascii=False)
    return tokens.render(prompt.token_ids), answer, prompt.token_ids[-10:]


def _cut(text: str) -> str:
    """Return a text as one line, cut in the middle."""
    line = text.replace("\n", "\\n")
    half = LINE // 2
    return printable(line if len(line) <= LINE else f"{line[:half]} [...] {line[-half:]}")
