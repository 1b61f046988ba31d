"""A Hub on loopback with an empty cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.hub_server import Hub, folder_files, serve_hub, use_hub
from tests.helpers.inputs import qwen3_config, write_checkpoint, write_prompts


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A server with the model org/model; the working directory holds the data file d.jsonl alone."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    write_prompts(Path("d.jsonl"))
    files = folder_files(write_checkpoint(tmp_path / "published", qwen3_config()))
    with serve_hub() as server:
        use_hub(server, tmp_path / "home", monkeypatch)
        server.add("models", "org/model", {**files, "README.md": b"# Model\n"})
        yield server
