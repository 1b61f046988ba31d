"""Clients' programs train through the gateway on real SGLang servers: what trained is what the servers sampled."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from mega_rl.tracking.records.reader import read_record
from mega_rl.verify.replay import prepare, replay_layouts
from tests.helpers.distributed import run_ranks
from tests.helpers.selection import FULL
from tests.helpers.sglang import needs_sglang
from tests.peers.package import missing
from tests.unit_tests.agents.test_gateway_training import AGENT, CLIENTS, settings_of, trained_turns, write_model

pytestmark = [
    pytest.mark.skipif(not FULL, reason="make test-full: two runs with a real server"),
    needs_sglang,
    pytest.mark.timeout(900),
]
STEPS, PROMPTS, SAMPLES = 2, 2, 4
SERVED = {
    "rollout.backend": "sglang", "rollout.sglang.server.args": {"max_total_tokens": 20000}, "rollout.n": SAMPLES,
    "trainer.steps": STEPS, "metrics.records.weights": True, "trainer.timeout_s": 300.0,
    "rollout.sglang.sync.timeout_s": 120.0,
}  # fmt: skip


def train_all(rank: int, runs: list[dict[str, Any]]) -> list[list[Any]]:
    """Return for each run its servers' answers, as their bytes say: what was read, ids and log-probs."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("cpu")
    from mega_rl.config.keys import with_settings
    from mega_rl.config.schema import Config
    from mega_rl.rollout.sglang.generation.client import SglangClient
    from mega_rl.trainer.assemble import running

    send, answered = SglangClient._send, list[list[Any]]()

    async def noted(self: SglangClient, method: str, path: str, body: Any, *more: Any) -> bytes:
        content = await send(self, method, path, body, *more)
        if path == "/generate" and body["sampling_params"]["max_new_tokens"] > 1:
            answer = json.loads(content)
            logprobs = [np.float32(entry[0]).item() for entry in answer["meta_info"]["output_token_logprobs"]]
            answered[-1].append((tuple(body["input_ids"]), tuple(answer["output_ids"]), tuple(logprobs)))
        return content

    with patch.object(SglangClient, "_send", noted):
        for settings in runs:
            answered.append([])
            with running([with_settings(Config(), settings)], accelerator) as ((trainer,), _):
                trainer.fit()
    return answered


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[Any]]]:
    """Folder and servers' answers of each client's run."""
    clients = [client for client in CLIENTS if not missing(client)]
    if not clients:
        pytest.skip(str(missing("openai")))
    folder = tmp_path_factory.mktemp("gateway")
    write_model(folder / "model")
    (folder / "agent.py").write_text(AGENT)
    (folder / "train.jsonl").write_text("".join(f'{{"prompt": "{n} a", "answer": ""}}\n' for n in range(8)))
    settings = [{**settings_of(folder, client), **SERVED} for client in clients]
    (answered,) = run_ranks(1, train_all, settings, timeout_s=800)
    return {client: (folder / client, own) for client, own in zip(clients, answered, strict=True)}


@pytest.mark.parametrize("client", CLIENTS)
def test_what_trains_is_what_the_server_sampled(runs: dict[str, tuple[Path, list[Any]]], client: str) -> None:
    """Each answer of the server trains once, behind what the server had read; its log-probs are the trainer's."""
    if reason := missing(client):
        pytest.skip(reason)
    folder, answered = runs[client]
    trained = trained_turns(folder, STEPS)
    assert Counter(trained) == Counter(answered)
    assert len(trained) == 2 * STEPS * PROMPTS * SAMPLES
    for step in range(1, STEPS + 1):
        tensors = read_record(folder / "records" / f"step_{step:06d}").tensors
        own = tensors["policy_logprobs"] if "policy_logprobs" in tensors else tensors["old_logprobs"]
        assert np.abs(own - tensors["rollout_logprobs"])[tensors["loss_mask"]].max() < 1e-5
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["rollout/weight_version"] for step in steps] == [2.0, 3.0]
    assert all(step["agent/turns_mean"] == 2.0 and step["actor/grad_norm"] > 0 for step in steps)


def test_a_served_step_replays_from_its_record(runs: dict[str, tuple[Path, list[Any]]], tmp_path: Path) -> None:
    """The last step, whose weights were updated and sent: bit for bit on one rank, closely on two."""
    folder, _ = next(iter(runs.values()))
    record, plans = prepare(folder / "records" / f"step_{STEPS:06d}", "1,tp2", tmp_path, timeout_s=120.0)
    assert int(record.tensors["turn"].max()) == 2
    largest = {
        layout.name: max(difference.largest for difference in differences)
        for layout, differences in replay_layouts(record, plans, tmp_path)
    }
    assert largest["1"] == 0.0
    assert largest["tp2"] < 1e-5
