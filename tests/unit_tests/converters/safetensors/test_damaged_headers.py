"""Damaged headers and indices: a message for the user or a correct reading; nothing else, quickly, in little memory."""

from __future__ import annotations

import json
import random
import struct
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mega_rl.converters.safetensors.header import INDEX_FILE
from mega_rl.converters.safetensors.reader import CheckpointReader
from mega_rl.errors import UserError

pytestmark = pytest.mark.slow

MUTANTS = 160  # of each kind
NASTY: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, 2**64, 10**300, 0.5, float("inf"), "", "x", "BF16", "F4", "\ud800", "é" * 5000,
    [], {}, [[]], [0, 0], [-1, 4], [2**40, 2**40], [1] * 200_000, [2**62] * 50_000, {"a": {}}, {"dtype": "F32"},
]  # fmt: skip
NAMES: list[Any] = [
    "../x", "/etc/passwd", "..", ".", "", "a/../../b", "a\0b", "a\\b", "~/x", "x" * 5000, "\ud800",
    "model-00001-of-00002", "sub/model.safetensors", INDEX_FILE, "config.json", 7, None, ["a"], {"a": 1},
    "//etc/hostname", "file:///etc/passwd",
]  # fmt: skip


def base(root: Path) -> Path:
    """A sharded checkpoint with a pair of 8-bit blocks and scales."""
    root.mkdir()
    first = {"a.weight": torch.ones(6, 4).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(1, 1)}
    second = {"b": torch.arange(12.0).view(3, 4), "c": torch.ones(5, dtype=torch.bfloat16)}
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name, tensors in zip(names, (first, second), strict=True):
        save_file(tensors, root / name)
    weight_map = {key: name for name, part in zip(names, (first, second), strict=True) for key in part}
    (root / INDEX_FILE).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return root


def attempt(root: Path) -> bool:
    """Opens and reads all; whether that worked. Anything but a UserError is let through."""
    try:
        with CheckpointReader(root) as reader:
            for name, info in reader.tensors.items():
                assert tuple(reader.read(name).shape) == info.shape
    except UserError:
        return False
    return True


OPENED: list[str] = []
ACTIVE = [False]


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and ACTIVE[0]:
        OPENED.append(str(arguments[0]))


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Callable[[], bool]]:
    """`attempt` on tmp_path / "model" under watch: time, memory and every file that is opened."""
    root = base(tmp_path / "model")
    if not OPENED:
        sys.addaudithook(_audit)
        OPENED.append("")
    tracemalloc.start()

    def run() -> bool:
        OPENED[1:] = []
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        start = time.monotonic()
        ACTIVE[0] = True
        try:
            worked = attempt(root)
        finally:
            ACTIVE[0] = False
        assert time.monotonic() - start < 5
        # The largest mutant is a header of some MB, and its parsed form.
        assert tracemalloc.get_traced_memory()[1] - before < 64 << 20
        outside = [path for path in OPENED[1:] if not Path(path).is_relative_to(root) and "safetensors" in path]
        strange = [path for path in OPENED[1:] if path.startswith("/etc") or ".." in path]
        assert not outside + strange
        return worked

    yield run
    tracemalloc.stop()


def test_the_base_is_good(watched: Callable[[], bool]) -> None:
    assert watched()


def test_bytes_of_a_header(tmp_path: Path, watched: Callable[[], bool]) -> None:
    """Flipped, cut out, repeated and truncated bytes, mostly of the header."""
    chosen = random.Random(1)
    worked = 0
    for number in range(MUTANTS):
        file = tmp_path / "model" / f"model-0000{number % 2 + 1}-of-00002.safetensors"
        good = file.read_bytes()
        blob = bytearray(good)
        length = 8 + struct.unpack("<Q", good[:8])[0]
        for _ in range(chosen.randint(1, 4)):
            at = chosen.randrange(min(length, len(blob))) if blob else 0
            match chosen.randrange(5):
                case 0 | 1:
                    blob[at:at + 1] = bytes([chosen.randrange(256)])  # fmt: skip
                case 2:
                    del blob[at : at + chosen.randint(1, 9)]
                case 3:
                    blob[at:at] = blob[at : at + chosen.randint(1, 30)]
                case _:
                    del blob[chosen.randrange(len(blob) + 1) :]
        file.write_bytes(blob)
        worked += watched()
        file.write_bytes(good)
    assert worked < MUTANTS // 2


def mutate(value: Any, chosen: random.Random, nasty: list[Any]) -> Any:
    """A JSON value with one of its parts replaced, dropped or doubled."""
    if isinstance(value, dict) and value and chosen.random() < 0.85:
        key = chosen.choice(list(value))
        kind = chosen.random()
        if kind < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if kind < 0.2:
            return value | {str(chosen.choice(NAMES)): value[key]}
        return value | {key: mutate(value[key], chosen, nasty)}
    if isinstance(value, list) and value and chosen.random() < 0.6:
        at = chosen.randrange(len(value))
        return [*value[:at], mutate(value[at], chosen, nasty), *value[at + 1 :]]
    return chosen.choice(nasty)


def test_values_of_a_header(tmp_path: Path, watched: Callable[[], bool]) -> None:
    chosen = random.Random(2)
    worked = 0
    for number in range(MUTANTS):
        file = tmp_path / "model" / f"model-0000{number % 2 + 1}-of-00002.safetensors"
        good = file.read_bytes()
        length = struct.unpack("<Q", good[:8])[0]
        header = mutate(json.loads(good[8 : 8 + length]), chosen, NASTY)
        text = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + good[8 + length :])
        worked += watched()
        file.write_bytes(good)
    assert worked < MUTANTS // 2


def test_values_of_an_index(tmp_path: Path, watched: Callable[[], bool]) -> None:
    chosen = random.Random(3)
    file = tmp_path / "model" / INDEX_FILE
    good = json.loads(file.read_text())
    worked = 0
    for _ in range(MUTANTS):
        file.write_text(json.dumps(mutate(good, chosen, NASTY + NAMES)))
        worked += watched()
    assert worked < MUTANTS // 2


@pytest.mark.parametrize("length", [0, 1, 7, 2**20, 99_999_999, 100_000_001, 2**31, 2**63, 2**64 - 1])
def test_lengths_of_a_header(tmp_path: Path, watched: Callable[[], bool], length: int) -> None:
    """A length is a claim: no memory is taken for it before the file is known to be as long."""
    file = tmp_path / "model" / "model-00002-of-00002.safetensors"
    file.write_bytes(struct.pack("<Q", length) + file.read_bytes()[8:])
    assert not watched()
