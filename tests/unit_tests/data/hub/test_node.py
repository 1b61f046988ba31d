"""Ranks of a node download a model, and the rows of a dataset, once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.hub_server import Hub, dataset_card, parquet_bytes

PROGRAM = """
import sys
from mega_rl.plan.preflight import preflight
config = preflight(None, sys.argv[1:])
print(config.model.path, config.data.train_files)
"""


@pytest.mark.slow
def test_two_ranks_download_once(hub: Hub) -> None:
    """Two processes as a launcher starts them."""
    rows = parquet_bytes(prompt=["1+1="] * 4, answer=["2"] * 4)
    hub.add("datasets", "org/sums", {"README.md": dataset_card(main=["train"]), "main/train.parquet": rows})
    hub.delays |= {"model.safetensors": 0.5, "train.parquet": 0.5}
    processes = []
    for rank in (1, 0):
        environment = {**os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": str(rank)}
        environment |= {"LOCAL_RANK": str(rank), "PYTHONPATH": str(Path(__file__).parents[4])}
        program = [sys.executable, "-c", PROGRAM, "model.path=org/model", "data.train_files=[org/sums:main]"]
        processes.append(subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0] == outputs[1] != ""
    assert len(hub.downloads("model.safetensors")) == 1
    assert len(hub.downloads("train.parquet")) == 1
