"""Settings of training data from several sources, and of validations and `mega-rl eval`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mega_rl.config.setting import Kind, setting
from mega_rl.config.values import settings_of, shown

SOURCES = "data.mixture.sources"
# data/prompts, data/epochs and so on are metrics of all sources
RESERVED = frozenset({"prompts", "epochs", "success_mean", "unseen_fraction", "solved_fraction", "unsolved_fraction"})


@dataclass(frozen=True)
class SourceConfig:
    """Part of a mixture: an entry of data.mixture.sources."""

    files: list[str] = setting([], "Its rows, named as data.train_files are.")
    weight: float = setting(0.0, "Its share of the drawn prompts, relative to the other sources' weights.", above=0.0)
    prompt_key: str = setting("", "Column with the prompt; data.prompt_key without.")
    answer_key: str = setting("", "Column with the answer; data.answer_key without.")
    system_prompt: str | None = setting(None, "In place of data.chat.system_prompt; empty for none.")
    template_kwargs: dict[str, object] = setting({}, "Variables of the chat template, over data.chat.template_kwargs.")


@dataclass(frozen=True)
class MixtureConfig:
    """Training prompts from several sources."""

    sources: dict[str, Any] = setting(
        {},
        "Sources by name instead of data.train_files: {math: {files: [math.jsonl], weight: 3}}. Each may have "
        "prompt_key, answer_key, system_prompt and template_kwargs.",
    )
    temperature: float = setting(
        1.0, "Without weights shares are numbers of prompts to the power 1/temperature.", above=0.0
    )

    def files(self) -> list[str]:
        """Return the files of all sources, in their order."""
        return [file for source in self.named().values() for file in source.files]

    def named(self) -> dict[str, SourceConfig]:
        """Return the sources by name, of settings that `completed_sources` has let pass."""
        return {name: SourceConfig(**entry) for name, entry in self.sources.items()}


@dataclass(frozen=True)
class StreamConfig:
    """Training prompts that are read during the run, if they do not fit into memory."""

    rows: int = setting(
        0, "Rows of a block in memory, shuffled together; two more are read ahead. 0: all.", unit="rows", min=0
    )
    timeout_s: float = setting(300.0, "The run ends when no rows come for this long.", unit="seconds", above=0.0)


@dataclass(frozen=True)
class AllPrompts(Kind):
    """All prompts alike, from the first step on."""

    name = "none"


@dataclass(frozen=True)
class SuccessCurriculum(Kind):
    """Prompts preferred by the success rate that the run measures in their own samples."""

    name = "success"

    prefer: str = setting(
        "learnable", "Weight by success rate p: p(1 - p) (learnable), or 1 - p.", choices=("learnable", "unsolved")
    )
    explore: float = setting(0.25, "Share of the draws that go through epochs of all prompts.", above=0.0, max=0.9)
    memory: float = setting(
        0.5, "Weight of a prompt's earlier samples at its next visit.",
        min=0.0, max=1.0
    )  # fmt: skip
    right_above: float = setting(0.5, "A sample with a reward above this is right.")
    right_part: str = setting("", "Named part of the reward that decides this; empty: the reward.")


def completed_sources(key: str, given: Mapping[str, object], problems: list[str]) -> dict[str, object]:
    """Return a source mapping's entries with values of the right types; mistakes go to `problems`."""
    return {name: _completed(f"{key}.{name}", entry, problems) for name, entry in given.items()}


def _completed(place: str, entry: object, problems: list[str]) -> dict[str, object]:
    if not isinstance(entry, dict):
        problems.append(f"{place}={shown(entry)}: needs a mapping, as {{files: [train.jsonl], weight: 1}}")
        return {}
    if not entry.get("files"):
        problems.append(f"{place}: has no files; name at least one JSONL or Parquet file")
    legal = ", ".join(field.name for field in dataclasses.fields(SourceConfig))
    unknown = f"{place}.{{}}: unknown setting of a source; legal: {legal}"
    return settings_of(SourceConfig, entry, place, problems, unknown.format)


@dataclass(frozen=True)
class ValidationConfig:
    """Samples of held-out prompts, every trainer.val_interval steps."""

    n: int = setting(1, "Samples of each prompt.", unit="samples", min=1, max=1024)
    temperature: float = setting(0.0, "Sampling temperature of evaluations; 0 is greedy.", min=0.0)
    top_p: float = setting(1.0, "Probability mass that is sampled from; 1 keeps all tokens.", above=0.0, max=1.0)
    top_k: int = setting(0, "Most likely tokens that are sampled from; 0 keeps all.", unit="tokens", min=0)
    max_new_tokens: int = setting(0, "Longest response; 0 takes rollout.max_new_tokens.", unit="tokens", min=0)
    chunk: int = setting(8192, "Samples drawn and scored together; bounds memory.", unit="samples", min=1)
    k: list[int] = setting([], "Values of k for pass@k and maj@k; empty takes 1 and n if n is above 1.")
    sets: dict[str, object] = setting(
        {},
        "Further held-out sets by name: {gsm8k: a.jsonl, math: [b.jsonl, c.jsonl]}. Their metrics are "
        "val/gsm8k/... and val/math/...",
    )
    right_above: float = setting(0.5, "A sample with a reward above this is right.")
    right_part: str = setting("", "Named part of the reward that decides this; empty: the reward.")

    @property
    def greedy(self) -> bool:
        """Return whether a prompt has one greedy response, as long as those of training."""
        return not (self.temperature or self.max_new_tokens)

    @property
    def counted(self) -> tuple[int, ...]:
        """Return the numbers k of samples for pass@k and maj@k; () if only rewards are reported."""
        usual = [1, self.n] if self.n > 1 else []
        return tuple(sorted(self.k or usual))
