"""Packaged recipes of several hosts: who starts, steers and asks which server. With real hosts: `make two-hosts`."""

from __future__ import annotations

import os
from typing import Any

import pytest

from mega_rl.config import packaged
from tests.helpers.distributed import run_ranks
from tests.helpers.models import write_tiny_checkpoint
from tests.helpers.packaged_hosts import PROMPTS, two_steps

RECIPES = [name for name in packaged.names() if "--nnodes" in packaged.file_of(name).read_text("utf-8")]


def two_by_two(rank: int, recipe: str, model: str, folder: str) -> dict[str, Any]:
    """Two steps on two hosts of two ranks."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    return two_steps(rank, recipe, model, folder)


@pytest.fixture(scope="module", params=RECIPES)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("hosts")
    write_tiny_checkpoint(folder / "model", num_hidden_layers=4)
    return run_ranks(4, two_by_two, request.param, str(folder / "model"), str(folder), device="cpu")


def test_each_rank_asks_the_servers_of_its_own_host(ranks: list[dict[str, Any]]) -> None:
    """Two ranks with two samples of each prompt in two steps."""
    assert [rank["asked_by"] for rank in ranks] == [[[0, 1]] * 2, [], [[2, 3]] * 2, []]
    assert [rank["rows"] for rank in ranks] == [[2 * PROMPTS] * 2] * 4
    assert [sum(rank["samples"]) for rank in ranks] == [2 * 2 * 2 * PROMPTS, 0] * 2


def test_no_server_is_started_again(ranks: list[dict[str, Any]]) -> None:
    assert [rank["starts"] for rank in ranks] == [[1, 1], [], [1, 1], []]
    assert all(rank["ready"] == ["ready"] * 4 for rank in ranks)


def test_first_rank_of_each_host_owns_its_servers(ranks: list[dict[str, Any]]) -> None:
    """The first of all steers them."""
    assert [rank["steered"] for rank in ranks] == [[0, 1, 2, 3], [], [], []]
    assert all(rank["owners"] == [0, 0, 2, 2] for rank in ranks)


def test_servers_have_keys_and_seeds_of_their_own(ranks: list[dict[str, Any]]) -> None:
    assert all(len(rank["keys"]) == 8 for rank in ranks)
    seeds = [seed for rank in ranks for seed in rank["seeds"]]
    assert len(set(seeds)) == len(seeds) == 4
