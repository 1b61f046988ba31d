"""Datasets by name as streams: pinned and never downloaded as a whole, the rows of a download, from any row on."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest

from mega_rl.config.render import resolved_yaml
from mega_rl.data.columns import RowColumns
from mega_rl.data.hub import DatasetName, hub_shards
from mega_rl.errors import UserError
from mega_rl.plan.preflight import preflight
from tests.helpers.hub_server import Hub, parquet_bytes

pytestmark = pytest.mark.slow

MODEL = "model.path=org/model"
STREAM = "data.stream.rows=8"
CARD = b"---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train-*.parquet\n---\n"
COLUMNS = RowColumns("prompt", "answer")


@pytest.fixture
def sums(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DatasetName:
    """The pinned name of org/sums, three files of ten rows; the library's look-ups are done in this process."""
    files = {
        f"main/train-{part:05d}-of-00003.parquet": parquet_bytes(
            prompt=[f"{part}+{i}" for i in range(10)], answer=[str(part + i) for i in range(10)]
        )
        for part in range(3)
    }
    commit = hub.add("datasets", "org/sums", {"README.md": CARD, **files})
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.url)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "home" / "datasets")
    return DatasetName("org/sums", "main", "train", commit)


def test_a_stream_is_pinned_and_not_downloaded(hub: Hub, sums: DatasetName, tmp_path: Path) -> None:
    (config,) = preflight([None], [MODEL, STREAM, "data.train_files=[org/sums, d.jsonl]"])
    assert config.data.train_files == [str(sums), "d.jsonl"]
    assert f"train_files: ['{sums}', d.jsonl]" in resolved_yaml(config)
    Path("again.yaml").write_text(resolved_yaml(config))
    assert preflight([Path("again.yaml")]) == [config]
    assert not list((tmp_path / "home").rglob("*.parquet"))


def test_rows_are_those_of_the_files_from_any_row_on(sums: DatasetName, tmp_path: Path) -> None:
    shards = hub_shards(sums)
    assert [shard.identity() for shard in shards] == [f"{sums} shard {n} of 3" for n in (1, 2, 3)]
    everything = [list(shard.rows(COLUMNS, skip=0)) for shard in shards]
    assert [row["prompt"] for part in everything for _, row in part] == [  # type: ignore[index]
        f"{part}+{i}" for part in range(3) for i in range(10)
    ]
    assert everything[1][4][0] == f"{sums} shard 2 of 3: row 5"
    for skip in (1, 9, 10):
        assert list(shards[1].rows(COLUMNS, skip=skip)) == everything[1][skip:]
    assert not list((tmp_path / "home").rglob("*.parquet"))


def test_sources_of_a_mixture_are_streamed_too(sums: DatasetName) -> None:
    mixture = {"sums": {"files": ["org/sums"], "weight": 2.0}, "plain": {"files": ["d.jsonl"], "weight": 1.0}}
    (config,) = preflight([None], {"model.path": "org/model", "data.mixture.sources": mixture, "data.stream.rows": 8})
    assert config.data.mixture.sources["sums"]["files"] == [str(sums)]


def test_what_the_hub_refuses_is_said_by_name(hub: Hub, sums: DatasetName) -> None:
    with pytest.raises(
        UserError, match=r"data.train_files=org/sums::train\[:3\]: a part of a split cannot be streamed"
    ):
        preflight([None], [MODEL, STREAM, "data.train_files=['org/sums::train[:3]']"])
    with pytest.raises(UserError, match="org/nothing"):
        preflight([None], [MODEL, STREAM, "data.train_files=[org/nothing]"])
    shards = hub_shards(sums)
    del hub.repos["datasets", "org/sums"].files["main/train-00001-of-00003.parquet"]
    with pytest.raises(UserError, match=rf"org/sums:main:train@{sums.revision} shard 2 of 3: the download failed: 404"):
        list(shards[1].rows(COLUMNS, skip=0))
