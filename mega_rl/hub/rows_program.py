"""The program behind `mega_rl.hub.rows`: read one split of a Hub dataset and write it as Parquet.

Its argument is a JSON object, its last line of output another: {"file", "commit", "config", "split"}, or {"problem"}.
With "only_name" nothing is downloaded or written, and the file is "". Of a local folder in the place of a repository it
is {"files"}, which stay where they are.
No code of the repository runs: the library has no dataset scripts any more, and is asked for remote data files alone.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets

from mega_rl.hub.errors import by_library, why_unreadable
from mega_rl.hub.names import COMMIT
from mega_rl.hub.stream import unreadable

VALIDATION_SPLITS = ("validation", "test")
UNREADABLE = unreadable()


class RowsProblem(Exception):
    """A mistake in the request, in words for the user."""


def locate(request: dict[str, Any]) -> Mapping[str, object]:
    """Return the Parquet or JSONL files of a split of a local folder."""
    datasets.utils.logging.set_verbosity(logging.ERROR)
    root = Path(request["repo"])
    builder = _builder(request, str(root))
    data_files = builder.config.data_files or {}
    split = _split(list(map(str, data_files)), request)
    files = [os.path.abspath(file) for file in data_files.get(split, ())]
    for file in files:
        if not Path(file).is_relative_to(os.path.abspath(root)):  # links of a cache may lead elsewhere
            raise RowsProblem(f"names {file}, which is outside of the folder")
        if not file.endswith((".parquet", ".jsonl")):
            raise RowsProblem(f"holds {file}; files of rows are .parquet or .jsonl")
    if not files:
        raise RowsProblem(f"takes a part of the split, {split}; name the whole of it")
    return {"files": files, "config": builder.config.name, "split": split}


def make(request: dict[str, Any]) -> dict[str, str]:
    """Write the split as a Parquet file under a unique name; return the resolved request."""
    datasets.utils.logging.set_verbosity(logging.ERROR)
    datasets.disable_progress_bars()
    place = f"hf://datasets/{request['repo']}"  # never a folder of that name
    builder = _builder(request, place)
    if request.get("only_name"):
        names = datasets.get_dataset_split_names(place, builder.config.name, revision=request["revision"])
        split = _split(list(names), request)
        return {"file": "", "commit": str(builder.hash), "config": builder.config.name, "split": split}
    builder.download_and_prepare()
    split = _split(list(builder.info.splits or ()), request)
    commit, asked = str(builder.hash), request["revision"]
    if COMMIT.fullmatch(commit) is None or (COMMIT.fullmatch(asked) and asked != commit):
        # Without a network the library takes what it has.
        raise RowsProblem(f"the cache holds version {commit}, not {asked}; download it once with a network")
    file = Path(request["folder"], f".{os.getpid()}.new")
    try:
        builder.as_dataset(split=split).to_parquet(file)
    except BaseException:
        file.unlink(missing_ok=True)
        raise
    return {"file": str(file), "commit": commit, "config": builder.config.name, "split": split}


def _builder(request: dict[str, Any], place: str) -> Any:
    config = request["config"]
    try:
        return datasets.load_dataset_builder(place, config or None, revision=request["revision"])
    except ValueError:
        names = datasets.get_dataset_config_names(place, revision=request["revision"])
        if config and config not in names:
            raise RowsProblem(f"has no configuration {config!r}; legal: {', '.join(names)}") from None
        if not config and len(names) > 1:
            example = f"{request['repo']}:{names[0]}"
            raise RowsProblem(f"name one of its configurations, as {example}; legal: {', '.join(names)}") from None
        raise


def _split(splits: list[str], request: dict[str, Any]) -> str:
    """Return the split that is asked for, or the one that its role stands for."""
    asked = request["split"]
    if asked:
        if asked.partition("[")[0] not in splits:
            raise RowsProblem(f"has no split {asked!r}; legal: {', '.join(splits)}")
        return str(asked)
    usual = ("train",) if request["role"] == "train" else VALIDATION_SPLITS
    for split in (*usual, *(splits if len(splits) == 1 else ())):
        if split in splits:
            return split
    raise RowsProblem(f"has no split {' or '.join(usual)}; name one of {', '.join(splits)}")


def answer(request: dict[str, Any]) -> Mapping[str, object]:
    """Return the outcome of `make` or `locate`, or {"problem"} with the reason of its failure."""
    try:
        return locate(request) if request["local"] else make(request)
    except RowsProblem as problem:
        return {"problem": str(problem)}
    except UNREADABLE as error:
        if request["local"]:
            return {"problem": by_library(error)}
        return {"problem": why_unreadable(error, repo=request["repo"], revision=request["revision"])}


if __name__ == "__main__":
    try:
        sys.stdout.write(json.dumps(answer(json.loads(sys.argv[1]))) + "\n")
    except KeyboardInterrupt:
        sys.exit(130)
