"""Saving a live model as a Hugging Face folder: from one rank and from several, layers kept and dropped, errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mega_rl.converters.hf.companions import copy_companions
from mega_rl.converters.hf.config import read_hf_config
from mega_rl.converters.live.export import ModelPlace
from mega_rl.converters.live.load import load_hf
from mega_rl.converters.live.save import SaveOptions, save_hf
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.converters.safetensors.reader import CheckpointReader
from mega_rl.converters.safetensors.writer import CheckpointWriter
from mega_rl.errors import UserError
from mega_rl.parallel.layout import ParallelLayout, RankCoordinates
from tests.helpers.distributed import run_ranks
from tests.unit_tests.converters.fakes import groups_of, planned_chunks
from tests.unit_tests.converters.random_checkpoints import write_random

FIRST = RankCoordinates()


def differences(a: Path, b: Path) -> list[str]:
    """Names of tensors that are not in both checkpoints with the same dtype and bytes."""
    with CheckpointReader(a) as first, CheckpointReader(b) as second:
        names = sorted(first.tensors.keys() | second.tensors.keys())
        return [
            name
            for name in names
            if name not in first.tensors
            or name not in second.tensors
            or first.tensors[name].dtype != second.tensors[name].dtype
            or not torch.equal(first.read(name), second.read(name))
        ]


def loaded(source: Path, sharding: Sharding, at: RankCoordinates) -> Any:
    chunks = planned_chunks(sharding, at)
    load_hf(chunks, source, sharding=sharding, coordinates=at)
    return chunks


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3", "gpt_oss", "mixtral"])
@pytest.mark.parametrize(("shard_bytes", "mtp"), [(20_000, "load"), (1 << 30, "drop")])
def test_one_rank(tmp_path: Path, family: str, shard_bytes: int, mtp: Any) -> None:
    """Prediction layers that the model does not load are taken from the source."""
    source = write_random(tmp_path / "hf", family)
    sharding = Sharding(replace(read_hf_config(source), mtp=mtp))
    chunks = loaded(source, sharding, FIRST)
    out = tmp_path / "out"
    save_hf(chunks, out, source=source, place=ModelPlace(sharding), options=SaveOptions(shard_bytes=shard_bytes))
    assert differences(source, out) == []
    for name in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    with pytest.raises(UserError, match="not empty"):
        save_hf(chunks, out, source=source, place=ModelPlace(sharding))
    with torch.no_grad():
        for param in chunks[0].parameters():
            param.zero_()
    save_hf(chunks, out, source=source, place=ModelPlace(sharding), options=SaveOptions(overwrite=True))
    with CheckpointReader(out) as reader:
        assert not reader.read("model.norm.weight").any()
    # Nothing of the shards that were there before.
    assert len(list(out.glob("*.safetensors"))) == 1
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_parameters_are_written_from_where_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a dense model no tensor is copied on the way."""
    source = write_random(tmp_path / "hf", "qwen3")
    sharding = Sharding(read_hf_config(source))
    chunks = loaded(source, sharding, FIRST)
    monkeypatch.setattr(CheckpointWriter, "write", lambda *_: pytest.fail("a copy was written"))
    save_hf(chunks, tmp_path / "out", source=source, place=ModelPlace(sharding))
    monkeypatch.undo()
    assert differences(source, tmp_path / "out") == []


def test_config_changes(tmp_path: Path) -> None:
    source = tmp_path / "config.json"
    source.write_bytes(b'{"b": 1,  "quantization_config": {}, "name": "\xc3\xa9"}\n')

    def copied(**changes: Any) -> bytes:
        out = Path(mkdtemp(dir=tmp_path))
        copy_companions(out, {"config.json": source}, changes)
        return (out / "config.json").read_bytes()

    assert copied() == source.read_bytes()
    changed = copied(quantization_config=None, b=2)
    assert json.loads(changed) == {"b": 2, "name": "é"}
    assert "é".encode() in changed


# Several ranks.

LAYOUTS = {
    "tp2-pp2": ParallelLayout(world_size=4, tp=2, pp=2, etp=2),
    "ep2-tp2": ParallelLayout(world_size=4, tp=2, ep=2),
    "ep2-etp2": ParallelLayout(world_size=4, tp=2, ep=2, etp=2),
    "ep2-pp2": ParallelLayout(world_size=4, pp=2, ep=2),
    "ep2-dp4": ParallelLayout(world_size=4, ep=2),
}


def save_on_four_ranks(rank: int, folder: str) -> list[str]:
    """What this rank found wrong."""
    dist.init_process_group("gloo")
    faults = []
    for name, layout in LAYOUTS.items():
        groups = groups_of(layout, rank)
        for family in ("deepseek_v3", "mixtral"):
            source, out = Path(folder) / family, Path(folder) / f"{family}-{name}"
            sharding, at = Sharding(read_hf_config(source), layout), layout.coordinates(rank)
            chunks = loaded(source, sharding, at)
            place = ModelPlace(sharding, at, **groups, bucket_bytes=4000)
            save_hf(chunks, out, source=source, place=place, options=SaveOptions(shard_bytes=30_000))
            dist.barrier()
            if rank == 0:
                faults += [f"{family} {name}: {fault}" for fault in differences(source, out)]
            if family == "mixtral":
                faults += failing(rank, chunks, Path(folder) / f"full-{name}", source, place)
    return faults


def failing(rank: int, chunks: Any, out: Path, source: Path, place: ModelPlace) -> list[str]:
    """The writer's disk is full: it raises, the others end as usual, and no rank waits for another."""

    def full(*_: object) -> None:
        raise UserError("disk full")

    faults, write = [], CheckpointWriter.write
    CheckpointWriter.write = full  # type: ignore[method-assign, assignment]
    try:
        save_hf(chunks, out, source=source, place=place)
        if rank == 0:
            faults.append("the writer did not fail")
    except UserError as error:
        if rank or str(error) != "disk full":
            faults.append(f"rank {rank}: {error}")
    CheckpointWriter.write = write  # type: ignore[method-assign]
    dist.barrier()
    if out.exists():
        faults.append(f"{out} exists")
    return faults


def test_four_ranks(tmp_path: Path) -> None:
    for family in ("deepseek_v3", "mixtral"):
        write_random(tmp_path / family, family)
    assert run_ranks(4, save_on_four_ranks, str(tmp_path), device="cpu") == [[], [], [], []]
