"""Training prompts from the section `data`: reading of rows, and the order of draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from mega_rl.config.schema import ChatConfig, DataConfig, SuccessCurriculum, TrainerConfig
from mega_rl.config.schema.data import SourceConfig
from mega_rl.data.chat import ChatTemplate, Tokenizer
from mega_rl.data.columns import RewardColumns, RowColumns
from mega_rl.data.hub import dataset_name, hub_shards
from mega_rl.data.order import (
    MixtureSampler,
    PromptSampler,
    StepOrder,
    SuccessRates,
    SuccessSampler,
    key_of,
    shares_of,
    weights_by_size,
)
from mega_rl.data.prompts import PromptReading, load_prompts
from mega_rl.data.stream import FileShard, Share, StreamPlan, StreamReader, StreamSampler, StreamShard
from mega_rl.errors import UserError, UserErrors
from mega_rl.types import Prompt

ONLY = ""  # name of the stream of a run without a mixture


def chat_template(tokenizer: Any, chat: ChatConfig) -> ChatTemplate | None:
    """Return the rendering of conversations by a Hugging Face tokenizer, None without a chat template."""
    if chat.template == "false" or (chat.template == "auto" and not tokenizer.chat_template):
        return None
    day = date.fromisoformat(chat.date) if chat.date else None
    of_strings = chat.template == "true"
    return ChatTemplate(tokenizer, chat.template_kwargs, chat.system_prompt, day, of_strings=of_strings)


@dataclass(frozen=True)
class PromptReader:
    """Reading of a run's prompts as the section `data` says, with the columns that rewards read."""

    data: DataConfig
    tokenizer: Tokenizer
    vocab_size: int
    columns: RewardColumns
    as_given: Callable[..., PromptReading] | None = None  # `ExampleReading` of a kind of given answers; None: prompts

    def reading(self, source: SourceConfig | None = None) -> PromptReading:
        """Return the reading of a source's rows: its settings take the place of those of `data`."""
        data, reward = self.data, self.columns if source is None else replace(self.columns, source="")
        source = source or SourceConfig()
        system_prompt = data.chat.system_prompt if source.system_prompt is None else source.system_prompt
        kwargs = {**data.chat.template_kwargs, **source.template_kwargs}
        keys = (source.prompt_key or data.prompt_key, source.answer_key or data.answer_key)
        return (self.as_given or PromptReading)(
            self.tokenizer,
            self.vocab_size,
            RowColumns(*keys, reward, given=self.as_given is not None),
            chat_template(self.tokenizer, replace(data.chat, system_prompt=system_prompt, template_kwargs=kwargs)),
            data.max_prompt_tokens,
            data.overlong_prompts,
            data.malformed_rows,
        )

    def mixture(self) -> list[Prompt]:
        """Return the prompts of all sources in order, with their source's name, numbered over all.

        Raises UserErrors with the problems of every source.
        """
        prompts: list[Prompt] = []
        problems: list[str] = []
        for name, source in self.data.mixture.named().items():
            try:
                own = load_prompts(source.files, self.reading(source))
            except UserError as error:
                problems += [f"data.mixture.sources.{name}: {line}" for line in str(error).splitlines()]
                continue
            first = prompts[-1].index + 1 if prompts else 0
            prompts += [replace(prompt, index=first + prompt.index, source=name) for prompt in own]
        if problems:
            raise UserErrors(problems)
        return prompts

    def streams(
        self, seed: int, check: Callable[[Sequence[Prompt]], None] | None = None
    ) -> Iterator[tuple[str, StreamReader]]:
        """Yield the readers of all streams by source; only their thread uses the tokenizer.

        check: raises UserError for unusable prompts of a block. Raises UserError.
        """
        data = self.data
        for name, source in (data.mixture.named() or {ONLY: SourceConfig(files=data.train_files)}).items():
            shards: list[StreamShard] = []
            for file in source.files:
                hub = dataset_name(file)
                shards += [FileShard(Path(file))] if hub is None else hub_shards(hub)
            plan = StreamPlan(data.stream.rows, data.shuffle, seed, key_of(name) if name else ())
            setting = f"data.mixture.sources.{name}" if name else "data.train_files"
            yield name, StreamReader(setting, shards, self.reading(source), plan, source=name, check=check)


def build_order(
    data: DataConfig, trainer: TrainerConfig, prompts: Sequence[Prompt]
) -> tuple[StepOrder, SuccessRates | None]:
    """Return the order in which a run draws prompts, and the success rates that it follows."""
    curriculum, sources = data.curriculum, data.mixture.named()
    rates = SuccessRates(prompts, memory=curriculum.memory) if isinstance(curriculum, SuccessCurriculum) else None
    if not sources:
        return _order_of(prompts, data, trainer, rates), rates
    by_source = {name: [prompt for prompt in prompts if prompt.source == name] for name in sources}
    if empty := [name for name, own in by_source.items() if not own]:
        raise UserError(
            f"data.val_size={data.val_size}: leaves data.mixture.sources.{empty[0]} no prompt to train on; make it "
            "smaller, or name data.val_files"
        )
    weights = {name: source.weight for name, source in sources.items()}
    if not any(weights.values()):
        weights = weights_by_size({name: len(own) for name, own in by_source.items()}, data.mixture.temperature)
    shares = shares_of(weights)
    samplers = {
        name: _order_of(own, data, trainer, rates, share=shares[name] / sum(shares.values()), key=key_of(name))
        for name, own in by_source.items()
    }
    return MixtureSampler(samplers, shares, batch_size=trainer.prompts_per_step, rates=rates), rates


def _order_of(
    prompts: Sequence[Prompt], data: DataConfig, trainer: TrainerConfig, rates: SuccessRates | None,
    *, share: float = 1.0, key: Sequence[int] = (),
) -> StepOrder:  # fmt: skip
    """Return the order of one source, which has a share of all draws; rates: measured success."""
    curriculum, seed = data.curriculum, trainer.seed
    batch_size = max(1, round(share * trainer.prompts_per_step))
    if isinstance(curriculum, SuccessCurriculum):
        assert rates is not None
        return SuccessSampler(
            prompts, rates, rule=curriculum.prefer, explore=curriculum.explore,
            batch_size=batch_size, seed=seed, key=key,
        )  # fmt: skip
    return PromptSampler(prompts, batch_size=batch_size, shuffle=data.shuffle, seed=seed, key=key)


def source_lines(prompts: Sequence[Prompt], order: StepOrder, *, steps: int) -> Iterator[str]:
    """Yield a line for each source of a mixture: prompts, tokens, share of draws."""
    drawn = order.drawn_after(steps)
    counts = order.metrics(drawn)
    for name in dict.fromkeys(prompt.source for prompt in prompts):
        if f"data/{name}/prompts" not in counts:  # a name that only rewards read
            continue
        own = [len(prompt.token_ids) for prompt in prompts if prompt.source == name]
        share, epochs = counts[f"data/{name}/prompts"] / drawn, counts[f"data/{name}/epochs"]
        yield (
            f"data source {name}: {len(own):,} prompts of {sum(own):,} tokens, {share:.1%} of all draws, {epochs:.3g} "
            f"epochs in {steps} steps"
        )


def build_stream_order(
    data: DataConfig, trainer: TrainerConfig, readers: Mapping[str, StreamReader], share: Share
) -> StepOrder:
    """Return the order of streamed prompts; readers: of the rank that reads, none on others."""

    batch_size = trainer.prompts_per_step

    def sampler(name: str) -> StreamSampler:
        return StreamSampler(readers.get(name), share, batch_size=batch_size, timeout_s=data.stream.timeout_s)

    sources = data.mixture.named()
    if not sources:
        return sampler(ONLY)
    samplers: dict[str, StepOrder] = {name: sampler(name) for name in sources}
    shares = shares_of({name: source.weight for name, source in sources.items()})
    return MixtureSampler(samplers, shares, batch_size=batch_size)
