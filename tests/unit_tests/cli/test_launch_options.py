"""Options of `mega-rl train` that start ranks."""

from __future__ import annotations

import pytest

from mega_rl.cli.train import LaunchOptions
from mega_rl.errors import UserError
from mega_rl.operations.launcher.launch import Launch
from mega_rl.operations.launcher.supervisor import DEFAULT_RESTARTS

KEY = {"MEGA_RL_LAUNCH_KEY": "k" * 32}
SEVERAL = LaunchOptions(nproc_per_node=8, nnodes=2, node_rank=1, master_addr="h", master_port=1234)


@pytest.mark.parametrize(
    ("options", "environment", "words"),
    [
        (LaunchOptions(max_restarts=1), {}, "--max-restarts: is for ranks that this command starts; add --nproc"),
        (LaunchOptions(nnodes=2), {}, "--nnodes: is for ranks"),
        (LaunchOptions(node_rank=1), {}, "--node-rank: is for ranks"),
        (LaunchOptions(master_addr="h"), {}, "--master-addr: is for ranks"),
        (LaunchOptions(nproc_per_node=2), {"RANK": "0"}, "--nproc-per-node=2 under a launcher that already started"),
        (LaunchOptions(nproc_per_node=2, node_rank=1), {}, "--node-rank=1: must be below --nnodes=1"),
        (LaunchOptions(nproc_per_node=2, nnodes=2), KEY, "--master-addr: is missing"),
        (SEVERAL, {}, "MEGA_RL_LAUNCH_KEY: is not set"),
        (SEVERAL, {"MEGA_RL_LAUNCH_KEY": "short"}, "MEGA_RL_LAUNCH_KEY: is too short"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: LaunchOptions, environment: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        options.check(environment)


def test_a_key_that_is_too_short_is_not_shown() -> None:
    with pytest.raises(UserError) as refused:
        SEVERAL.check({"MEGA_RL_LAUNCH_KEY": "hush-hush"})
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "world_size", "needs_launcher"),
    [
        (LaunchOptions(), None, False),
        (LaunchOptions(nproc_per_node=1), 1, False),
        (LaunchOptions(nproc_per_node=1, max_restarts=2), 1, True),
        (LaunchOptions(nproc_per_node=2), 2, True),
        (LaunchOptions(nproc_per_node=1, nnodes=2, master_addr="h"), 2, True),
        (SEVERAL, 16, True),
    ],
)
def test_ranks_and_whether_a_launcher_starts_them(
    options: LaunchOptions, world_size: int | None, needs_launcher: bool
) -> None:
    options.check(KEY)
    assert (options.world_size, options.needs_launcher) == (world_size, needs_launcher)


def test_one_node_needs_neither_address_nor_key() -> None:
    """Schedulers give them all the same."""
    options = LaunchOptions(nproc_per_node=4, node_rank=0, master_addr="10.0.0.1", master_port=4711)
    options.check({})
    launch = options.launch(["m"], run_dir="r", resume="never")
    assert launch == Launch(("m",), 4, max_restarts=DEFAULT_RESTARTS, run_dir="r", resume="never")
    assert launch.master_addr == "127.0.0.1"


def test_several_nodes_are_told_of_one_another() -> None:
    launch = SEVERAL.launch(["m"], run_dir="r", resume="auto")
    assert (launch.nnodes, launch.node_rank) == (2, 1)
    assert (launch.master_addr, launch.master_port) == ("h", 1234)


def test_launches_of_all_nodes_have_one_digest() -> None:
    """Whatever their numbers, and whatever restarts each would allow: those of node 0 count."""
    first = LaunchOptions(nproc_per_node=8, nnodes=2, master_addr="h", master_port=1234, max_restarts=7)
    one, other = (options.launch(["m", "a=1"], run_dir="r", resume="auto") for options in (first, SEVERAL))
    assert one.digest == other.digest
    assert one.digest != SEVERAL.launch(["m", "a=2"], run_dir="r", resume="auto").digest
