"""Training prompts of a run that are streamed: rank 0 reads them, and gives every rank what a step draws."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mega_rl.config.schema import Config, SourceConfig
from mega_rl.data.columns import RewardColumns, RowColumns
from mega_rl.data.hub.names import dataset_name
from mega_rl.data.hub.rows import hub_shards
from mega_rl.data.prompts import PromptReading, fingerprint
from mega_rl.data.sampling.epochs import StepOrder
from mega_rl.data.sampling.mixture import MixtureSampler, key_of, shares_of
from mega_rl.data.stream import FileShard, StreamPlan, StreamReader, StreamSampler, StreamShard
from mega_rl.parallel.agreement import run_on_one
from mega_rl.protocols import Ranks
from mega_rl.rewards.build import check_tests
from mega_rl.tracking import progress
from mega_rl.trainer.assemble.data import Tokens, chat_of, chat_template, warn_of_prompts
from mega_rl.types import Prompt

ONLY = ""  # name of the stream of a run without a mixture


@dataclass(frozen=True)
class TrainStreams:
    """Streams of a run by the name of their source."""

    readers: dict[str, StreamReader]  # of rank 0; empty on others
    fingerprint: str  # of their files and first blocks, and of what they are read with
    ranks: Ranks

    def order(self, config: Config) -> StepOrder:
        """Return the order of the run's prompts."""
        size, sources = config.trainer.prompts_per_step, config.data.mixture.named()
        if not sources:
            return self._sampler(config, ONLY, size)
        samplers: dict[str, StepOrder] = {name: self._sampler(config, name, size) for name in sources}
        shares = shares_of({name: source.weight for name, source in sources.items()})
        return MixtureSampler(samplers, shares, batch_size=size)

    def _sampler(self, config: Config, name: str, batch_size: int) -> StreamSampler:
        share = partial(run_on_one, ranks=self.ranks)
        timeout_s = config.data.stream.timeout_s
        return StreamSampler(self.readers.get(name), share, batch_size=batch_size, timeout_s=timeout_s)


def open_streams(
    config: Config,
    tokens: Tokens,
    *,
    vocab_size: int,
    columns: RewardColumns,
    ranks: Ranks,
    check: Callable[[list[Prompt]], None],
) -> TrainStreams | None:
    """Open the run's streams and read the first block of each on rank 0; None for a run without; collective.

    check: raises UserError for prompts that the reward cannot score; given those of the first blocks. Tests of programs
    are tried in every block. Raises UserErrors on all ranks.
    """
    if not config.data.stream.rows:
        return None
    readers: dict[str, StreamReader] = {}

    def read() -> str:
        digest, first = hashlib.sha256(), []
        try_tests = partial(check_tests, config.reward)
        for name, reader in stream_readers(config, tokens, vocab_size, columns, try_tests):
            readers[name] = reader
            prompts = reader.first_block()
            first += prompts
            content = [name, str(reader.plan), *(shard.identity() for shard in reader.shards), fingerprint(prompts)]
            digest.update("\n".join(content).encode() + b"\n")
        warn_of_prompts(tokens, config.data.chat, first)
        check(first)
        return digest.hexdigest()

    with progress.phase("reading the first rows of the data", announce=True):
        identity = run_on_one(read, ranks)
    return TrainStreams(readers, identity, ranks)


def stream_readers(
    config: Config,
    tokens: Tokens,
    vocab_size: int,
    columns: RewardColumns,
    check: Callable[[Sequence[Prompt]], None] | None = None,
) -> Iterator[tuple[str, StreamReader]]:
    """Yield the readers of all streams by name. Raises UserError."""
    data = config.data
    tokenizer = copy.deepcopy(tokens.tokenizer)  # a reader has a thread of its own
    sources = data.mixture.named() or {ONLY: SourceConfig(files=data.train_files)}
    for name, source in sources.items():
        reading = PromptReading(
            tokenizer,
            vocab_size,
            RowColumns(source.prompt_key or data.prompt_key, source.answer_key or data.answer_key, columns),
            chat_template(tokenizer, chat_of(data.chat, source)),
            data.max_prompt_tokens,
            data.overlong_prompts,
            data.malformed_rows,
        )
        plan = StreamPlan(data.stream.rows, data.shuffle, config.trainer.seed, key_of(name) if name else ())
        setting = f"data.mixture.sources.{name}" if name else "data.train_files"
        yield name, StreamReader(setting, _shards(source.files), reading, plan, source=name, check=check)


def _shards(files: Sequence[str]) -> list[StreamShard]:
    """Return the shards of files and data sets of the Hub, in their order. Raises UserError."""
    shards: list[StreamShard] = []
    for file in files:
        name = dataset_name(file)
        shards += [FileShard(Path(file))] if name is None else hub_shards(name)
    return shards
