"""Comparison of two checkpoints: names, dtypes, shapes, bits, and the size of differences.

It streams: a few megabytes of two tensors are in memory at a time, for a model of any size.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

import xxhash
from torch import Tensor

from mega_rl.converters.live.copying import BlockReader, TensorLike
from mega_rl.storage.safetensors_header import matrix_shape
from mega_rl.storage.safetensors_reader import bits, same_bits

CHUNK_BYTES = 16 << 20


class Advance(Protocol):
    """Callback for the bytes compared since the last call."""

    def __call__(self, nbytes: int, /) -> None: ...


@dataclass(frozen=True)
class Different:
    """A tensor whose bits differ, and by how much."""

    name: str
    elements: int  # how many differ
    numel: int
    max_abs: float  # largest |a - b|; nan where a value is not a number
    mean_abs: float
    max_of_first: float  # largest |a|, to judge the others by


@dataclass(frozen=True)
class Comparison:
    """Differences between two checkpoints; they are equal if every list is empty."""

    only_first: tuple[str, ...] = ()
    only_second: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()  # dtype or shape, in words
    different: tuple[Different, ...] = ()
    config: tuple[str, ...] = ()  # keys of config.json that differ, in words
    allowed: tuple[str, ...] = ()  # names in one only that the caller allows
    num_equal: int = 0
    digests: Mapping[str, str] = field(default_factory=dict)  # of each tensor of the first: type, shape and bits

    @property
    def digest(self) -> str:
        """Return a digest of the first checkpoint, independent of its shards; equal digests mean equal checkpoints."""
        return xxhash.xxh3_128(json.dumps(sorted(self.digests.items())).encode()).hexdigest()

    @property
    def equal(self) -> bool:
        """Return whether only allowed names differ."""
        return not (self.only_first or self.only_second or self.mismatched or self.different or self.config)

    def to_json(self) -> dict[str, Any]:
        """Return it as decoded JSON, for other processes."""
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
        return values | {"different": [vars(one) for one in self.different], "digests": dict(self.digests)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Comparison:
        """Return what `to_json` gave."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in raw.items()
        }
        values["different"] = tuple(Different(**one) for one in raw["different"])
        return cls(**values)


def compare(
    first: BlockReader,
    second: BlockReader,
    *,
    allow_missing: Sequence[str] = (),
    share: tuple[int, int] = (0, 1),
    advance: Advance = lambda nbytes: None,
) -> Comparison:
    """Compare the tensors of two readers by name, dtype, shape and bits; names in `allow_missing` may be in one only.

    `share` (i, n) compares the contents of every nth tensor from the ith on, for n processes whose answers are then
    joined by `merge`; names are compared in full by each.
    """
    names = {True: set(first.tensors), False: set(second.tensors)}
    single = {name for name in names[True] ^ names[False] if any(fnmatchcase(name, p) for p in allow_missing)}
    mismatched, different, digests = [], [], {}
    for name in sorted(names[True], key=first.position)[share[0] :: share[1]]:
        a, b = first.tensors[name], second.tensors.get(name)
        numbers = _Numbers()
        if b is not None and _kind(a) == _kind(b):
            pairs = zip(_chunks(first, name), _chunks(second, name), strict=True)
            digests[name] = _digest(a, numbers.watch(pairs, advance))
        else:
            digests[name] = _digest(a, _chunks(first, name))
            mismatched += [f"{name}: {_kind(a)} against {_kind(b)}"] if b is not None else []
        different += [numbers.report(name)] if numbers.elements else []
    shared = sum(name in names[False] for name in digests)
    return Comparison(
        only_first=tuple(sorted(names[True] - names[False] - single)),
        only_second=tuple(sorted(names[False] - names[True] - single)),
        mismatched=tuple(mismatched),
        different=tuple(different),
        allowed=tuple(sorted(single)),
        num_equal=shared - len(mismatched) - len(different),
        digests=digests,
    )


def merge(parts: Sequence[Comparison]) -> Comparison:
    """Return one comparison from those of all shares."""
    return replace(
        parts[0],
        mismatched=tuple(sorted(line for part in parts for line in part.mismatched)),
        different=tuple(sorted((d for part in parts for d in part.different), key=lambda d: d.name)),
        num_equal=sum(part.num_equal for part in parts),
        digests={name: digest for part in parts for name, digest in part.digests.items()},
    )


def compare_configs(first: Path, second: Path, *, intended: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the differences of two folders' config.json, a line each; empty if the bytes are equal.

    Keys that match a pattern of `intended` may differ. Equal values under other bytes (order, spaces) are a difference
    too: a config is copied, not written anew.
    """
    texts = [
        (folder / "config.json").read_bytes() if (folder / "config.json").is_file() else None
        for folder in (first, second)
    ]
    if texts[0] == texts[1]:
        return ()
    missing = [str(folder) for folder, text in zip((first, second), texts, strict=True) if text is None]
    if missing:
        return (f"{missing[0]} has no config.json",)
    a, b = (json.loads(text or b"{}") for text in texts)
    keys = [key for key in {**a, **b} if a.get(key, _ABSENT) != b.get(key, _ABSENT)]
    lines = [
        f"{key}: {_shown(a, key)} against {_shown(b, key)}"
        for key in keys
        if not any(fnmatchcase(key, p) for p in intended)
    ]
    return tuple(lines) if keys else ("same values, other bytes",)


_ABSENT = object()


def _shown(config: Mapping[str, Any], key: str) -> str:
    return json.dumps(config[key]) if key in config else "absent"


@dataclass
class _Numbers:
    """Statistics of the differences between two streams of one tensor."""

    elements: int = 0
    numel: int = 0
    max_abs: float = 0.0
    total_abs: float = 0.0
    max_of_first: float = 0.0
    _nan: bool = field(default=False)

    def watch(self, pairs: Iterator[tuple[Tensor, Tensor]], advance: Advance) -> Iterator[Tensor]:
        """Compare the pairs and yield the first stream's tensors."""
        for a, b in pairs:
            self.numel += a.numel()
            if not same_bits(a, b):
                self._add(a, b)
            advance(a.nbytes)
            yield a

    def _add(self, a: Tensor, b: Tensor) -> None:
        changed = (bits(a) != bits(b)).view(a.numel(), -1).any(dim=1)
        x, y = a.contiguous().view(-1)[changed].double(), b.contiguous().view(-1)[changed].double()
        gap = (x - y).abs()
        self._nan = self._nan or bool(gap.isnan().any())
        self.elements += len(gap)
        self.max_abs = max(self.max_abs, float(gap.nan_to_num(0.0).max()))
        self.total_abs += float(gap.nan_to_num(0.0).sum())
        self.max_of_first = max(self.max_of_first, float(a.double().nan_to_num(0.0).abs().max()))

    def report(self, name: str) -> Different:
        """Return the statistics of a tensor that differs."""
        largest = float("nan") if self._nan else self.max_abs
        return Different(name, self.elements, self.numel, largest, self.total_abs / self.numel, self.max_of_first)


def _digest(tensor: TensorLike, chunks: Iterator[Tensor]) -> str:
    """Return 128 bits over a tensor's dtype, shape and contents, as hexadecimal text."""
    digest = xxhash.xxh3_128(_kind(tensor).encode())
    for chunk in chunks:
        digest.update(bits(chunk).numpy().data)
    return digest.hexdigest()


def _chunks(reader: BlockReader, name: str) -> Iterator[Tensor]:
    """Yield blocks of whole rows of a tensor, each of bounded size."""
    info = reader.tensors[name]
    rows, cols = matrix_shape(info.shape)
    step = max(1, CHUNK_BYTES // max(1, cols * info.dtype.itemsize))
    for low in range(0, rows, step):
        yield reader.read_block(name, (low, min(low + step, rows)), (0, cols))


def _kind(tensor: TensorLike) -> str:
    """ "bfloat16 [4, 8]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
