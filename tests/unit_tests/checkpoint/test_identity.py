"""A model is known by its content, and a refusal names what a person can look at."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mega_rl.checkpoint.identity import changes, differences, file_records, model_identity
from tests.helpers.inputs import qwen3_config


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(qwen3_config()))
    tensors = {f"t{i}": torch.arange(24.0).view(4, 6) + i for i in range(5)}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_copied_or_resharded_model_keeps_its_identity(model: Path, tmp_path: Path) -> None:
    expected = model_identity(model)
    copy = shutil.copytree(model, tmp_path / "copy")
    assert model_identity(copy) == expected
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    weight_map = {}
    for name, tensor in tensors.items():
        save_file({name: tensor}, copy / f"{name}.safetensors")
        weight_map[name] = f"{name}.safetensors"
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = json.loads((copy / "config.json").read_text()) | {"transformers_version": "9"}
    (copy / "config.json").write_text(json.dumps(config, indent=7))
    assert model_identity(copy) == expected


def test_other_weights_or_another_config_are_another_model(model: Path) -> None:
    before = model_identity(model)
    tensors = load_file(model / "model.safetensors")
    save_file({**tensors, "t3": tensors["t3"] + 1}, model / "model.safetensors")
    weights = model_identity(model)
    config = json.loads((model / "config.json").read_text()) | {"rope_theta": 7.0}
    (model / "config.json").write_text(json.dumps(config))
    assert len({before, weights, model_identity(model)}) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("rewrite", "other files (a.jsonl)"),
        ("same size", "other files (a.jsonl)"),
        ("settings", "data.val_size 0 -> 7"),
        ("nothing", "the same files give other prompts: by the tokenizer, or this version's reading of them"),
    ],
)
def test_data_that_differ(change: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text("{}")
    before = file_records({"a.jsonl": "a.jsonl", "gone": "not/here"})
    Path("a.jsonl").write_text({"rewrite": "{'a'}", "same size": "[]"}.get(change, "{}"))
    old, new = ({"data": {"val_size": size, "train_files": ["a.jsonl"]}} for size in (0, 7 * (change == "settings")))
    actual = differences(
        {"data": "x", "data_files": before},
        {"data": "y", "data_files": file_records({"a.jsonl": "a.jsonl"})},
        stored_config=old,
        config=new,
    )
    assert actual == [f"training prompts: {message}"]


def test_parts_that_only_one_run_has_differ() -> None:
    stored, current = {"seed": 1, "model.adapter.rank": 8}, {"seed": 1, "algorithm.kind": "sft"}
    words = differences(stored, current, stored_config={}, config={})
    assert words == ["model.adapter.rank: 8 -> None", "algorithm.kind: None -> 'sft'"]
    assert differences(current, current, stored_config={}, config={}) == []


def test_changed_settings_in_words() -> None:
    """Settings of only one of the two are none."""
    old = {"engine": {"backend": "fsdp"}, "optim": {"lr": 1e-3}, "trainer": {"steps": 4, "run_dir": "a"}}
    new = {"engine": {"backend": "fsdp"}, "optim": {"lr": 5e-4}, "trainer": {"steps": 8, "run_dir": "a"}}
    assert changes(old, {**new, "new section": {"x": 1}}) == "optim.lr 0.001 -> 0.0005, trainer.steps 4 -> 8"
