"""A real SGLang server of two nodes, both on this machine: what it answers before and after an update, and its end.

In network namespaces of their own: `make two-hosts`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from mega_rl.rollout.sglang.control import Endpoint
from mega_rl.rollout.sglang.server import launcher
from mega_rl.rollout.sglang.server.process import ServerProcess, ServerSettings
from tests.helpers.distributed import run_ranks
from tests.helpers.models import write_tiny_checkpoint
from tests.helpers.selection import FULL
from tests.helpers.sglang import (
    DEVICE,
    START_S,
    generate,
    listening_addresses,
    needs_sglang,
    private_folder,
    request,
    wait_until,
)
from tests.unit_tests.rollout.sglang.nodes_on_ranks import send

pytestmark = [
    needs_sglang,
    pytest.mark.skipif(not FULL, reason="two nodes of a real server are in make test-full"),
    pytest.mark.timeout(900),
]
PROMPTS = [[3, 4, 5], list(range(2, 30))]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[ServerProcess], Endpoint, Path]]:
    folder = tmp_path_factory.mktemp("nodes")
    for seed, name in enumerate("ab"):
        write_tiny_checkpoint(folder / name, seed=seed)
    parts = [
        ServerProcess(
            ServerSettings(
                folder / "a",
                tp=2,
                nodes=2,
                node=number,
                device=DEVICE,
                args={"max_total_tokens": 4000},
                start_timeout_s=2 * START_S,
            ),
            index=0,
            folder=folder,
        )
        for number in range(2)
    ]
    meeting = parts[0].reserve_meeting()
    with ExitStack() as stack:
        for part in parts:
            stack.callback(part.stop)
            part.start(meeting)
        endpoint, _ = [part.wait_ready() for part in parts]
        yield parts, endpoint, folder


def assert_serves(endpoint: Endpoint, checkpoint: Path) -> None:
    """The log-probs of greedy tokens are transformers' of this checkpoint."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    for prompt, answer in zip(PROMPTS, generate(endpoint, PROMPTS, max_new_tokens=16), strict=True):
        tokens = answer["output_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        given = torch.tensor([logprob for logprob, *_ in answer["meta_info"]["output_token_logprobs"]])
        torch.testing.assert_close(given, expected, atol=1e-5, rtol=0)  # float32 sums in another order


def test_two_nodes_serve_one_model(nodes: Any) -> None:
    parts, endpoint, folder = nodes
    assert_serves(endpoint, folder / "a")
    _, info = request(endpoint, "/server_info")
    assert (info["tp_size"], info["nnodes"], info["node_rank"]) == (2, 2, 0)
    for part in parts:
        assert listening_addresses(part.pid) == {"127.0.0.1"}


def test_health_of_a_further_node_needs_its_key(nodes: Any) -> None:
    parts, *_ = nodes
    endpoint = parts[1].wait_ready()
    assert [request(endpoint, "/health", key=key)[0] for key in ("api", None, "wrong")] == [200, 401, 401]


def test_an_update_reaches_the_ranks_of_both_nodes(nodes: Any) -> None:
    _, endpoint, folder = nodes
    address = {"index": 0, "url": endpoint.url, "api_key": endpoint.keys.api_key, "admin_key": endpoint.keys.admin_key}
    (failed,) = run_ranks(1, send, folder / "b", address, device=DEVICE, timeout_s=200)
    assert failed == {}
    assert_serves(endpoint, folder / "b")


def test_a_server_ends_with_its_second_node(nodes: Any) -> None:
    """The last test here: a rank of the second node is killed."""
    parts, *_ = nodes
    groups = [part.pid for part in parts]
    folders = [private_folder(own) for own in groups]
    ranks = [process for process in launcher.group_members(groups[1]) if process.pid != groups[1]]
    scheduler = next(process for process in ranks if "scheduler" in " ".join(process.cmdline()) + process.name())
    os.kill(scheduler.pid, signal.SIGKILL)
    for own in groups:
        wait_until(f"end of group {own}", lambda own=own: not launcher.group_members(own), timeout_s=30.0)
    assert "node 1 at 127.0.0.1 has ended" in parts[0].log_file.read_text()
    for part in parts:
        part.stop()
    assert not any(folder.exists() for folder in folders)
