"""Filling parameters from a reader: straight, cast, turned, in pieces, from several threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mega_rl.converters.live import copying as fill_module
from mega_rl.converters.live.copying import fill, fill_all, in_threads
from mega_rl.converters.plan.blocks import Copy
from mega_rl.converters.safetensors.reader import CheckpointReader
from mega_rl.errors import UserError


def reference(target: Tensor, copies: Sequence[Copy], tensors: dict[str, Tensor]) -> Tensor:
    """Element by element, as `Copy` says it."""
    result = target.clone()
    for c in copies:
        for i in range(c.rows):
            for j in range(c.cols):
                value: Tensor | float = 0.0
                if c.hf_name is not None:
                    row, col = (
                        (c.src_row + j, c.src_col + i * c.step) if c.transposed else (c.src_row + i, c.src_col + j)
                    )
                    value = tensors[c.hf_name][row, col]
                result[c.dst_row + i, c.dst_col + j] = value
    return result


COPIES = [
    Copy("a", 2, 0, 0, 0, 3, 6),  # whole rows
    Copy("a", 5, 0, 4, 0, 2, 6),  # that go on in the tensor, not in the parameter
    Copy(None, 0, 0, 3, 0, 1, 6),
    Copy("a", 0, 1, 6, 2, 4, 3),  # a cut of the columns
    Copy("b", 1, 0, 10, 0, 5, 6, True),  # turned
    Copy("b", 0, 1, 15, 1, 3, 4, True, 2),  # every second column, turned
]


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"a": torch.randn(9, 6, generator=generator), "b": torch.randn(8, 7, generator=generator)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("piece_bytes", [1, 30, 16 << 20])
@pytest.mark.parametrize("threads", [1, 3])
def test_every_kind_of_copy(
    tmp_path: Path,
    tensors: dict[str, Tensor],
    dtype: torch.dtype,
    piece_bytes: int,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one piece and in the smallest ones; the staging buffer holds a row at least, whatever its size."""
    monkeypatch.setattr(fill_module, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(fill_module, "STAGING_BYTES", piece_bytes)
    save_file(tensors, tmp_path / "model.safetensors")
    target = torch.full((18, 6), 7.0, dtype=dtype)
    expected = reference(target, COPIES, tensors)
    with CheckpointReader(tmp_path) as reader:
        written = fill_all([(target, COPIES)], reader, threads=threads)
        assert torch.equal(target, expected)
        assert written == sum(c.rows * c.cols for c in COPIES)
        # Every second column is read with the one before it: a step skips nothing on disk.
        width = {False: lambda c: c.rows * c.cols, True: lambda c: c.src_shape[0] * c.src_shape[1]}
        assert reader.bytes_read == 4 * sum(width[c.transposed](c) for c in COPIES if c.hf_name is not None)


def test_bare_8_bit_values_are_no_weights(tmp_path: Path) -> None:
    save_file({"x": torch.ones(4, 4).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with CheckpointReader(tmp_path) as reader, pytest.raises(UserError, match=r"x: .* without scales"):
        fill(torch.zeros(4, 4), [Copy("x", 0, 0, 0, 0, 4, 4)], reader)


def test_the_first_error_of_a_thread_is_raised_and_the_rest_is_left() -> None:
    done: list[int] = []
    other_is_busy = threading.Event()

    def work(task: int) -> None:
        if task == 0:
            other_is_busy.wait(5)
            raise UserError("task 0")
        done.append(task)
        other_is_busy.set()
        threading.Event().wait(0.02)

    with pytest.raises(UserError, match="task 0"):
        in_threads(range(1000), work, threads=2)
    assert 0 < len(done) < 900
