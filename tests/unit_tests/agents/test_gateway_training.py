"""Unchanged programs of OpenAI's and Anthropic's clients train a policy, on the ids that were sampled."""

from __future__ import annotations

import json
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from mega_rl.agents.environment import TurnQueue, TurnRequest
from mega_rl.tracking.records.reader import read_record
from mega_rl.types import ENDS
from tests.helpers.distributed import run_ranks
from tests.helpers.selection import FULL
from tests.peers.package import FOLDER, missing

pytestmark = pytest.mark.timeout(1800 if FULL else 300)

STEPS, PROMPTS, SAMPLES = (12, 2, 8) if FULL else (1, 2, 2)
CLIENTS = {
    "openai": """
client = openai.OpenAI()
def ask(messages):
    answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=12).choices[0]
    return answer.message, answer.message.content
""",
    "anthropic": """
client = anthropic.Anthropic()
def ask(messages):
    answer = client.messages.create(model="policy", messages=messages, max_tokens=12)
    content = answer.content or [{"type": "text", "text": ""}]
    return {"role": "assistant", "content": content}, "".join(one.text for one in answer.content)
""",
}
PROGRAM = """
import json, sys
sys.path.append({folder!r})
import {client}
{ask}
assert client.models.list().data[0].id == "policy"
messages = json.load(sys.stdin)["messages"]
for turn in range(2):
    message, text = ask(messages)
    messages += [message, {{"role": "user", "content": f"{{len(text)}} b"}}]
"""
AGENT = """
from dataclasses import dataclass
import mega_rl

@dataclass
class Agent(mega_rl.Gateway):
    pass

def share(response):
    return response.count("a") / max(len(response), 1)
"""
TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def write_model(folder: Path) -> None:
    """A tokenizer of sixteen characters and tokens, and a fresh model."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from mega_rl.verify.tiny_models import fresh_qwen3

    names = ["<pad>", "<e>", "<u>", "<a>", "\n", " ", *"0123456789"[:8], "a", "b"]
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in names[:4]])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<e>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    model = fresh_qwen3(len(names), width=64, initializer_range=0.1, max_positions=128, eos=1, pad=0, seed=0)
    model.save_pretrained(folder)


def settings_of(folder: Path, client: str) -> dict[str, Any]:
    """Write a client's program; return the settings of its run."""
    text = PROGRAM.format(folder=str(FOLDER), client=client, ask=CLIENTS[client])
    assert len(text.splitlines()) <= 40
    (folder / f"{client}.py").write_text(text)
    return {
        "model.path": str(folder / "model"), "model.dtype": "fp32", "optim.lr": 5e-3,
        "data.train_files": [str(folder / "train.jsonl")], "data.max_prompt_tokens": 16, "data.chat.template": "true",
        "rollout.source": f"{folder}/agent.py:Agent", "rollout.n": SAMPLES, "rollout.max_new_tokens": 64,
        "rollout.source.program": shlex.join([sys.executable, "-P", f"{folder}/{client}.py"]),
        "reward.function": f"{folder}/agent.py:share", "checkpoint.resume": "never", "checkpoint.save_final": False,
        "trainer.run_dir": str(folder / client), "trainer.steps": STEPS, "trainer.prompts_per_step": PROMPTS,
        "trainer.minibatch_size": PROMPTS, "trainer.timeout_s": 60.0, "metrics.records.interval": 1,
        "metrics.progress_bar": False,
    }  # fmt: skip


def train_all(rank: int, runs: list[dict[str, Any]]) -> list[list[Any]]:
    """Return the turns that the engine sampled in each run: what was read, and (ids, log-probs)."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("cpu")
    from mega_rl.config.keys import with_settings
    from mega_rl.config.schema import Config
    from mega_rl.trainer.assemble import running

    ask, sampled = TurnQueue.put, list[list[Any]]()

    def asked(self: TurnQueue, request: TurnRequest) -> Any:
        answer = ask(self, request)

        def note(answered: Any) -> None:
            got = answered.result()
            sampled[-1].append((request.token_ids, got.token_ids, got.logprobs))

        answer.add_done_callback(note)
        return answer

    with patch.object(TurnQueue, "put", asked):
        for settings in runs:
            sampled.append([])
            with running([with_settings(Config(), settings)], accelerator) as ((trainer,), _):
                trainer.fit()
    return sampled


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[Any]]]:
    """Folder and sampled turns of each client's run."""
    clients = [client for client in CLIENTS if not missing(client)]
    if not clients:
        pytest.skip(str(missing("openai")))
    folder = tmp_path_factory.mktemp("gateway")
    write_model(folder / "model")
    (folder / "agent.py").write_text(AGENT)
    (folder / "train.jsonl").write_text("".join(f'{{"prompt": "{n} a", "answer": ""}}\n' for n in range(8)))
    (sampled,) = run_ranks(1, train_all, [settings_of(folder, client) for client in clients], timeout_s=1500)
    return {client: (folder / client, own) for client, own in zip(clients, sampled, strict=True)}


def trained_turns(folder: Path, steps: int) -> list[Any]:
    """Return the turns that a run's records train: what was read, ids and log-probs."""
    trained: list[Any] = []
    for step in range(1, steps + 1):
        record = read_record(folder / "records" / f"step_{step:06d}")
        columns = [record.tensors[name] for name in ("tokens", "loss_mask", "rollout_logprobs")]
        for tokens, mask, logprobs in zip(*columns, strict=True):
            edges = [
                place
                for place in range(1, len(mask) + 1)
                if (mask[place] if place < len(mask) else 0) != mask[place - 1]
            ]
            for first, end in zip(edges[::2], edges[1::2], strict=True):
                ids, numbers = tokens[first:end].tolist(), logprobs[first:end].tolist()
                trained.append((tuple(tokens[:first].tolist()), tuple(ids), tuple(numbers)))
        assert set(record.tensors["end"]) <= {ENDS.index("done"), ENDS.index("length")}
    return trained


@pytest.mark.parametrize("client", CLIENTS)
def test_unchanged_clients_train_on_sampled_ids(runs: dict[str, tuple[Path, list[Any]]], client: str) -> None:
    """Each turn that the engine sampled trains once, with its log-probs, behind what it had read; nothing else does.

    Every second turn read the first one as it was sampled.
    """
    if reason := missing(client):
        pytest.skip(reason)
    folder, sampled = runs[client]
    trained = trained_turns(folder, STEPS)
    assert Counter(trained) == Counter(sampled)
    assert len(trained) == 2 * STEPS * PROMPTS * SAMPLES
    firsts = {(*read, *ids) for read, ids, _ in sampled}
    seconds = [read for read, *_ in sampled if any(read[:end] in firsts for end in range(len(read)))]
    assert len(seconds) == STEPS * PROMPTS * SAMPLES
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(step["agent/turns_mean"] == 2.0 and step["rollout/logprob_diff_max"] < 1e-4 for step in steps)
    assert min(step["actor/grad_norm"] for step in steps) > 0


@pytest.mark.skipif(not FULL, reason="a run of one step")
@pytest.mark.parametrize("client", CLIENTS)
def test_the_reward_of_a_client_rises(runs: dict[str, tuple[Path, list[Any]]], client: str) -> None:
    lines = (runs[client][0] / "metrics.jsonl").read_text().splitlines()
    rewards = [json.loads(line)["reward/mean"] for line in lines]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2, rewards
