"""Which tokens end a response."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from transformers import GenerationConfig, PreTrainedConfig


def with_end_of_sequence(model_path: Path, config: PreTrainedConfig, extra: Sequence[int] = ()) -> tuple[int, ...]:
    """Sorted: generation_config.json's end-of-sequence ids where it names any, else config.json's; and `extra`."""
    ids: int | list[int] | None = None
    if (model_path / "generation_config.json").is_file():
        ids = GenerationConfig.from_pretrained(model_path, local_files_only=True).eos_token_id
    if ids is None:
        ids = config.eos_token_id
    return tuple(sorted({*_as_list(ids), *extra}))


def _as_list(ids: int | list[int] | None) -> Iterator[int]:
    if isinstance(ids, int):
        yield ids
    elif ids is not None:
        yield from ids
