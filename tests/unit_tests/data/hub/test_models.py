"""Models by name: from a server that speaks the Hub's protocol, through the whole preflight."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from huggingface_hub import file_download

from mega_rl.config.keys import pinned_overrides
from mega_rl.config.render import resolved_yaml
from mega_rl.errors import UserError
from mega_rl.plan.preflight import preflight
from tests.helpers.hub_server import Hub, folder_files, go_offline
from tests.helpers.inputs import qwen3_config, write_checkpoint

DATA = "data.train_files=[d.jsonl]"
NAMED = ("model.path=org/model", DATA)


def problem(*overrides: str) -> str:
    """The one line that a run is refused with."""
    with pytest.raises(UserError) as caught:
        preflight([None], list(overrides))
    (line,) = str(caught.value).splitlines()
    return line


def test_a_name_becomes_a_folder_and_the_record_keeps_name_and_commit(hub: Hub) -> None:
    commit = hub.repos["models", "org/model"].revisions["main"]
    config = preflight([None], NAMED)[0]
    assert (Path(config.model.path) / "model.safetensors").is_file()
    assert Path(config.model.path).name == commit
    assert f"path: org/model@{commit}" in resolved_yaml(config)
    Path("again.yaml").write_text(resolved_yaml(config))
    hub.requests.clear()
    again = preflight([Path("again.yaml")])[0]
    assert again == config
    assert preflight([None], [DATA, *pinned_overrides(config)])[0] == config
    assert hub.requests == []  # a commit that is in the cache needs no network


def test_neither_code_nor_pickles_nor_other_folders_are_downloaded(hub: Hub) -> None:
    repo = hub.repos["models", "org/model"]
    unwanted = ("modeling_x.py", "pytorch_model.bin", "consolidated.safetensors", "onnx/config.json", "x.gguf")
    repo.files.update(dict.fromkeys(unwanted, b"x"))
    repo.files["LICENSE"] = b"free"
    folder = Path(preflight([None], NAMED)[0].model.path)
    assert sorted(folder_files(folder)) == [
        "LICENSE", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert not any(r.path.endswith(unwanted) for r in hub.requests)


def test_a_path_that_exists_is_never_a_name(hub: Hub) -> None:
    write_checkpoint(Path("org/model"), qwen3_config())
    assert preflight([None], NAMED)[0].model.path == "org/model"
    assert hub.requests == []


def test_a_run_that_cannot_start_downloads_no_weights(hub: Hub) -> None:
    hub.requests.clear()
    line = problem(*NAMED, "trainer.minibatch_size=63")
    assert line.startswith("trainer.minibatch_size=63 does not divide")
    assert hub.requests == []
    line = problem(*NAMED, "data.max_prompt_tokens=50000", "trainer.microbatch.max_tokens=60000")
    assert "is above the 40960 positions of model.path" in line
    assert hub.downloads("config.json")
    assert not hub.downloads("model.safetensors")


def test_a_download_that_breaks_off_is_one_line_and_the_next_try_completes(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_download.time, "sleep", lambda seconds: None)
    hub.cuts["model.safetensors"] = [0] * 6
    line = problem(*NAMED)
    assert line.startswith("model.path=org/model: the download failed: ")
    assert line.endswith("start again: files that are complete are kept")
    hub.requests.clear()
    assert preflight([None], NAMED)[0]
    assert hub.downloads("model.safetensors")
    assert not hub.downloads("config.json")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("org/model@v9", "the model has no revision 'v9' at {url}; name a branch, a tag or a commit of it"),
        ("org/modle", "there is no such file or folder here, and {url} shows no model of that name; or set HF_TOKEN"),
        ("gated/model", "access to it is restricted: accept its terms at {url}/gated/model, then set HF_TOKEN or run"),
        ("no/weights", "no/weights holds no safetensors weights (model.safetensors); other formats are not read"),
        ("no/config", "no/config has no config.json at this revision"),
    ],
)
def test_what_the_hub_refuses_is_one_line(hub: Hub, name: str, words: str) -> None:
    files = hub.repos["models", "org/model"].files
    hub.add("models", "gated/model", files, gated=True, token="hf_good")
    hub.add("models", "no/weights", {n: c for n, c in files.items() if n != "model.safetensors"})
    hub.add("models", "no/config", {"README.md": b""})
    line = problem(f"model.path={name}", DATA)
    assert line.startswith(f"model.path={name}: ")
    assert words.format(url=hub.url) in line


def test_a_token_comes_from_the_environment_alone(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    hub.add("models", "gated/model", hub.repos["models", "org/model"].files, gated=True, token="hf_good")
    monkeypatch.setenv("HF_TOKEN", "hf_bad")
    line = problem("model.path=gated/model", DATA)
    assert "then check that HF_TOKEN may read it" in line
    assert "hf_bad" not in line
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    hub.requests.clear()
    config = preflight([None], ["model.path=gated/model", DATA])[0]
    sent = {request.authorization for request in hub.requests if "/gated/model/" in request.path}
    assert sent == {"Bearer hf_good"}
    assert "hf_good" not in resolved_yaml(config) + caplog.text


def test_offline_takes_the_cache_and_names_what_it_lacks(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    config = preflight([None], NAMED)[0]
    hub.requests.clear()
    go_offline(monkeypatch)
    assert preflight([None], NAMED)[0] == config
    (Path(config.model.path) / "model.safetensors").unlink()
    assert "1 file(s) are missing (model.safetensors)" in problem(*NAMED)
    line = problem("model.path=org/other", DATA)
    assert "no model of that name and revision in the cache" in line
    assert line.endswith("download it once without HF_HUB_OFFLINE")
    assert hub.requests == []


def test_a_run_that_goes_on_keeps_the_commit_it_began_with(hub: Hub) -> None:
    began = preflight([None], NAMED)[0]
    run_dir = Path(began.trainer.run_dir)
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text(resolved_yaml(began))
    hub.repos["models", "org/model"].revisions = {"main": "f" * 40, "old": Path(began.model.path).name}
    assert preflight([None], NAMED)[0].model.path != began.model.path  # nothing has been saved: it begins again
    (run_dir / "checkpoints" / "step_000001").mkdir(parents=True)
    assert preflight([None], NAMED)[0] == began
    assert preflight([None], [*NAMED, "checkpoint.resume=never"])[0].model.path != began.model.path
    assert preflight([None], ["model.path=org/model@old", DATA])[0].model.path == began.model.path
