"""Options of `mega-rl train` that start ranks."""

from __future__ import annotations

import pytest

from mega_rl.cli.train import LaunchOptions
from mega_rl.errors import UserError

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


def test_launches_of_all_nodes_have_one_digest() -> None:
    """Whatever their numbers, and whatever restarts each would allow: those of node 0 count."""
    first = LaunchOptions(nproc_per_node=8, nnodes=2, master_addr="h", master_port=1234, max_restarts=7)
    one, other = (options.launch(["m", "a=1"], run_dir="r", resume="auto") for options in (first, SEVERAL))
    assert one.digest == other.digest
    assert one.digest != SEVERAL.launch(["m", "a=2"], run_dir="r", resume="auto").digest
