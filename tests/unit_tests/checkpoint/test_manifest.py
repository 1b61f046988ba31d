"""The manifest: written and read again, and every mistake named. Mutants are in test_damage.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mega_rl.checkpoint.format.manifest import (
    Manifest,
    WholeTensor,
    check_commit,
    commit_text,
    manifest_text,
    parse_manifest,
)
from mega_rl.checkpoint.format.shards import ShardRecord
from mega_rl.errors import UserError, UserErrors
from tests.unit_tests.checkpoint.written import manifest_of, tensors


def example() -> Manifest:
    return manifest_of(7, tensors(), [ShardRecord("shard_00000.safetensors", 99, "0" * 16)], metrics={"a/b": 0.25})


def test_written_files_are_read_back() -> None:
    manifest = example()
    actual = parse_manifest(manifest_text(manifest).encode(), "manifest.json")
    assert actual == manifest
    assert actual.tensors["actor/exp_avg/scale"] == WholeTensor("F32", ())


def test_every_mistake_is_in_one_error() -> None:
    raw = json.loads(manifest_text(example()))
    raw |= {"step": -1, "world_size": 0, "metrics": {"a": "b"}}
    raw["shards"][0]["bytes"] = "many"
    with pytest.raises(UserErrors) as caught:
        parse_manifest(json.dumps(raw).encode(), "F/manifest.json")
    problems = caught.value.problems
    assert len(problems) == 4
    assert problems[0].startswith("F/manifest.json: step=-1 is not as a save writes it")
    assert all(problem.startswith("F/manifest.json: ") for problem in problems)


def test_commit_is_of_one_manifest_only() -> None:
    text = manifest_text(example()).encode()
    commit = commit_text(text).encode()
    check_commit(commit, text, Path("F"))
    with pytest.raises(UserError, match=r"F/manifest.json: .* expected .*COMMIT"):
        check_commit(commit, text + b" ", Path("F"))
    with pytest.raises(UserError, match="F/COMMIT"):
        check_commit(commit.replace(b": ", b":  "), text, Path("F"))
