"""Writing checkpoints: in any order, from several threads, complete or not there at all."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mega_rl.converters.safetensors import writer as safetensors_writer
from mega_rl.converters.safetensors.header import INDEX_FILE
from mega_rl.converters.safetensors.output_folder import output_folder
from mega_rl.converters.safetensors.writer import CheckpointWriter, SafetensorsFile, TensorSpec, write_checkpoint
from mega_rl.errors import UserError


def some_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(7, 5, generator=generator).bfloat16(),
        "b": torch.randn(4, generator=generator),
        "c": torch.randn(2, 3, 4, generator=generator).double(),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(2.5),
    }


def specs_of(tensors: dict[str, Tensor]) -> list[TensorSpec]:
    return [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


@pytest.mark.parametrize("seed", range(5))
def test_rows_in_any_order_from_several_threads(tmp_path: Path, seed: int) -> None:
    tensors = some_tensors()
    chosen = random.Random(seed)
    parts: list[tuple[str, int, list[Tensor]]] = []
    for name, tensor in tensors.items():
        matrix = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.reshape(-1, 1)
        cuts = sorted({0, len(matrix), *(chosen.randint(0, len(matrix)) for _ in range(3))})
        for low, high in pairwise(cuts):
            middle = (low + high) // 2
            # Rows that do not lie together in memory, one call.
            parts.append((name, low, [matrix[low:middle].clone(), matrix.t().contiguous().t()[middle:high]]))
    chosen.shuffle(parts)
    with SafetensorsFile(tmp_path / "x.safetensors", specs_of(tensors)) as file:
        workers = [
            threading.Thread(target=lambda share: [file.write_rows(*part) for part in share], args=(parts[i::3],))
            for i in range(3)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    actual = load_file(tmp_path / "x.safetensors")
    assert actual.keys() == tensors.keys()
    assert all(same(actual[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("rows", [[(0, 3)], [(0, 4), (4, 7), (2, 3)], [(1, 7)], []])
def test_every_byte_is_written_exactly_once(tmp_path: Path, rows: Sequence[tuple[int, int]]) -> None:
    tensor = torch.ones(7, 5)
    file = SafetensorsFile(tmp_path / "x", [TensorSpec("a", tensor.dtype, (7, 5))])
    for low, high in rows:
        file.write_rows("a", low, [tensor[low:high]])
    with pytest.raises(AssertionError, match="rows"):
        file.close()


def test_written_tensors_must_match_their_specs(tmp_path: Path) -> None:
    with SafetensorsFile(tmp_path / "x", [TensorSpec("a", torch.float32, (2, 3))]) as file:
        for wrong in (torch.ones(2, 3).half(), torch.ones(3, 2), torch.ones(6)):
            with pytest.raises(AssertionError, match="a: "):
                file.write("a", wrong)
        with pytest.raises(AssertionError):
            file.write_rows("a", 1, [torch.ones(2, 3)])
        file.write("a", torch.ones(2, 3))
    with pytest.raises(UserError, match="a is written twice"):
        SafetensorsFile(tmp_path / "y", [TensorSpec("a", torch.float32, (1,))] * 2)


def test_an_incomplete_checkpoint_gets_no_index(tmp_path: Path) -> None:
    tensors = some_tensors()
    with pytest.raises(AssertionError), CheckpointWriter(tmp_path, specs_of(tensors), shard_bytes=1) as writer:
        writer.write("a", tensors["a"])
    assert not (tmp_path / INDEX_FILE).exists()


# The folder.


def put(folder: Path, **files: str) -> None:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_json", ".json")).write_text(text)


def test_overwriting_leaves_nothing_of_the_old(tmp_path: Path) -> None:
    target = tmp_path / "out"
    put(target, config_json="old", stale="shard")
    with pytest.raises(UserError, match="not empty"), output_folder(target):
        pytest.fail("must not begin")
    with pytest.raises(RuntimeError), output_folder(target, overwrite=True):
        raise RuntimeError
    assert (target / "stale").exists()
    with output_folder(target, overwrite=True) as work:
        put(work, config_json="new")
    assert {path.name: path.read_text() for path in target.iterdir()} == {"config.json": "new"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_only_checkpoints_are_overwritten(tmp_path: Path) -> None:
    put(tmp_path / "thesis", text="x")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "thesis")
    for name, message in {
        "thesis": "is not a checkpoint",
        "file": "is not a directory",
        "link": "is not a directory",
    }.items():
        with pytest.raises(UserError, match=message), output_folder(tmp_path / name, overwrite=True):
            pytest.fail("must not begin")
    assert (tmp_path / "thesis" / "text").exists()


KILLED = """
import sys, time, torch
from mega_rl.converters.safetensors.writer import *
specs = [TensorSpec(name, torch.float32, (1000,)) for name in "abc"]
with output_folder(sys.argv[1], overwrite=True) as work, CheckpointWriter(work, specs, shard_bytes=1) as writer:
    (work / "config.json").write_text("{}")
    writer.write("a", torch.ones(1000))
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("there_before", [False, True])
def test_a_killed_run_leaves_nothing_that_looks_complete(tmp_path: Path, there_before: bool) -> None:
    target = tmp_path / "out"
    if there_before:
        put(target, config_json="before")
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(target)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    with pytest.raises(UserError, match="another process"), output_folder(target, overwrite=True):
        pytest.fail("must not begin")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["out"] * there_before
    assert not list(tmp_path.rglob(INDEX_FILE))
    # The next run is not in the way of what the killed one left.
    write_checkpoint(target, [("a", torch.ones(3))], overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in target.iterdir()] == ["model.safetensors"]


def test_killed_between_the_two_renames(tmp_path: Path) -> None:
    put(tmp_path / ".out.old", config_json="before")
    with pytest.raises(RuntimeError), output_folder(tmp_path / "out", overwrite=True):
        raise RuntimeError
    assert (tmp_path / "out" / "config.json").read_text() == "before"


# Disks that fail.


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_disk_that_fills_up(tmp_path: Path, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writes before are short, as a nearly full disk does them; the error names the file and the free space."""
    calls = 0

    def failing(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.pwrite(fd, buffers[0][:100], offset)

    monkeypatch.setattr(safetensors_writer.os, "pwritev", failing)
    message = r"model\.safetensors.*No space left on device.* [\d.,]+ [GM]B free"
    specs = [TensorSpec("a", torch.float32, (1000,))]
    with (
        pytest.raises(UserError, match=message),
        output_folder(tmp_path / "out") as work,
        CheckpointWriter(work, specs) as writer,
    ):
        writer.write("a", torch.ones(1000))
    assert list(tmp_path.iterdir()) == []


def test_files_are_flushed_before_folder_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is flushed after its last byte, then the folder; only then it is renamed, and that is flushed too."""
    target, flushed = tmp_path / "out", []
    fsync = os.fsync

    def recording(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        flushed.append((path.name, path.stat().st_size if path.is_file() else -1, target.exists()))
        fsync(fd)

    monkeypatch.setattr(safetensors_writer.os, "fsync", recording)
    tensors = some_tensors()
    with output_folder(target) as work, CheckpointWriter(work, specs_of(tensors), shard_bytes=60) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    files = {(path.name, path.stat().st_size, False) for path in target.iterdir()}
    assert len(files) > 2
    assert set(flushed[:-2]) == files
    assert flushed[-2:] == [(".out.partial", -1, False), (tmp_path.name, -1, True)]
