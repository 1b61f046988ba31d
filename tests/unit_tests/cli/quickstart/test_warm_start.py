"""The supervised warm start on two ranks: the first part of the quickstart."""

from __future__ import annotations

from pathlib import Path

import torch

from mega_rl.converters.safetensors.reader import CheckpointReader
from tests.helpers.distributed import run_ranks
from tests.helpers.engines import make_config
from tests.helpers.models import write_tiny_checkpoint

STEPS = 3


def warm(rank: int, source: str, output: str) -> None:
    """A few steps on a handful of demonstrations, tensor-parallel over two ranks."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    from mega_rl.cli.quickstart.warm_start import warm_start

    demonstrations = [((2 + i, 3, 4), (5, 6 + i, 1)) for i in range(8)]
    config = make_config(Path(source), layout="tp2")
    warm_start(config, accelerator, demonstrations, output=Path(output), steps=STEPS, batch_size=4, lr=1e-3)


def test_warm_start_changes_every_tensor(tmp_path: Path) -> None:
    """All tensors of the source under their names, with other values."""
    source = write_tiny_checkpoint(tmp_path / "source")
    run_ranks(2, warm, str(source), str(tmp_path / "out"))
    assert (tmp_path / "out" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    with CheckpointReader(source) as before, CheckpointReader(tmp_path / "out") as after:
        assert before.tensors.keys() == after.tensors.keys()
        unchanged = [name for name in before.tensors if torch.equal(before.read(name), after.read(name))]
    assert unchanged == []
