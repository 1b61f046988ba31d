"""Dataset repositories as streams: shards of a split, read by the `datasets` library and never kept on the disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mega_rl.errors import UserError
from mega_rl.hub.errors import FAILURES, why_unreadable
from mega_rl.hub.names import DatasetName


@dataclass(frozen=True)
class HubShard:
    """A shard of a split at a commit, as the library cuts it: a file, or a part of one."""

    dataset: Any  # datasets.IterableDataset of the whole split
    pinned: DatasetName
    number: int
    num_shards: int

    @property
    def name(self) -> str:
        return f"{self.pinned} shard {self.number + 1} of {self.num_shards}"

    @property
    def schema(self) -> object:
        """pyarrow.Schema of the rows; None where the library does not know it, as of JSONL."""
        return getattr(self.dataset.features, "arrow_schema", None)

    def identity(self) -> str:
        return self.name

    def rows(self, columns: object, *, skip: int) -> Iterator[tuple[str, object]]:
        """Yield (place, row) from row `skip` on. Raises UserError for what the Hub or the library refuses."""
        with _readable(self.pinned, self.name):
            shard = self.dataset.shard(num_shards=self.num_shards, index=self.number)
            for number, row in enumerate(shard.skip(skip) if skip else shard, start=skip + 1):
                yield f"{self.name}: row {number}", row


def hub_shards(pinned: DatasetName) -> list[HubShard]:
    """Return the shards of a split at a commit. Raises UserError."""
    import datasets

    with _readable(pinned, str(pinned)):
        remote = f"hf://datasets/{pinned.repo}"  # never a folder of that name
        builder = datasets.load_dataset_builder(remote, pinned.config, revision=pinned.revision)
        dataset = builder.as_streaming_dataset(split=pinned.split)
        count = dataset.num_shards
    return [HubShard(dataset, pinned, number, count) for number in range(count)]


def unreadable() -> tuple[type[Exception], ...]:
    """Return what the datasets library may end with where it cannot read a set."""
    import datasets
    import pyarrow
    import yaml

    return (
        *FAILURES,
        RuntimeError,
        FileNotFoundError,
        datasets.exceptions.DatasetsError,
        pyarrow.ArrowException,
        yaml.YAMLError,
    )


@contextmanager
def _readable(pinned: DatasetName, label: str) -> Iterator[None]:
    """Raise what the Hub or the library refuses as a UserError that begins with the label."""
    try:
        yield
    except unreadable() as error:
        raise UserError(f"{label}: {why_unreadable(error, repo=pinned.repo, revision=pinned.revision)}") from error
