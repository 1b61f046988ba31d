"""Settings of every test."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from collections.abc import Iterator

# Before torch is imported: two cores are shared by all ranks of a test.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Imports and thousands of tests are objects that stay: no collection need go through them, now or later.
gc.disable()

import pytest  # noqa: E402
import torch  # noqa: E402

# What a test file uses when it starts ranks, servers or programs: seconds each, and not for the inner loop.
LAUNCHES = re.compile(
    r"\b(run_ranks|run_megatron_fsdp|subprocess|ServerProcess|torchrun|tests\.helpers\.sglang)\b|_cases import"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--fast`, which leaves out what starts ranks, servers or programs, and what is marked slow."""
    parser.addoption("--fast", action="store_true", help="only tests that start no ranks, servers or programs")


def pytest_configure(config: pytest.Config) -> None:
    """Make the markers known, and property tests independent of the machine's speed."""
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skipped, with the reason, where there is none")
    config.addinivalue_line("markers", "slow: left out by --fast")
    if config.pluginmanager.hasplugin("hypothesispytest"):  # a machine with a GPU may lack it
        from hypothesis import HealthCheck, settings

        settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("any speed")


@pytest.fixture(autouse=True)
def no_environment_plays_on() -> Iterator[None]:
    """A thread that plays trajectories beyond its test would fail the next one that looks for threads."""
    yield
    deadline = time.monotonic() + 10
    while playing := [one for one in threading.enumerate() if one.name == "environments"]:
        assert time.monotonic() < deadline, f"environments play on: {playing}"
        time.sleep(0.05)


def pytest_collection_finish() -> None:
    """Collect garbage again."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what `--fast` leaves out, and skip what needs a GPU where there is none.

    Files that start ranks, servers or programs come first and of the others the large ones, so that workers end at
    about the same time.
    """
    launching = {path: bool(LAUNCHES.search(path.read_text(encoding="utf-8"))) for path in {i.path for i in items}}
    place = {path: (0, 0) if launches else (1, -path.stat().st_size) for path, launches in launching.items()}
    items.sort(key=lambda item: place[item.path])
    if config.getoption("--fast"):
        left_out = [item for item in items if launching[item.path] or _is_slow(item)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device and none is visible"))


def _is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None or "special_distributed" in item.path.parts
