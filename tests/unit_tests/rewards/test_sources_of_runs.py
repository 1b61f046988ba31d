"""Whole runs whose rewards come from a model or a service, on both engines.

Two steps of GRPO on two ranks, that cut the model or share its weights. Rewards are what transformers' own class says
of the very tokens that were sampled, or of the conversation that they are decoded to, or what a service answered.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mega_rl.tracking.metrics.records import read_metrics
from tests.helpers.distributed import run_ranks
from tests.helpers.models import write_digit_tokenizer, write_tiny_checkpoint
from tests.unit_tests.rewards.model_cases import transformers_scores, write_other_tokenizer, write_reward_model
from tests.unit_tests.rewards.test_service import Answer, Post, scores, serving
from tests.unit_tests.trainer.assemble.run_cases import run_all

ENGINES = {"megatron": "engine.megatron.tp=2", "fsdp": "engine.fsdp.reshard_after_forward=false"}
SOURCES = ("own tokens", "conversation", "plain text", "service")
STEPS, PROMPTS, SAMPLES = 2, 4, 2
TOLERANCE = 1e-5  # fp32: sums in another order
KEY = "a-service-key"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An actor; reward models of two layers: with its tokenizer, and of another family with one of their own."""
    folder = tmp_path_factory.mktemp("rewards")
    write_tiny_checkpoint(folder / "actor", num_hidden_layers=1)
    write_digit_tokenizer(folder / "actor", vocab_size=50)
    write_reward_model(folder / "own tokens", family="qwen3", num_hidden_layers=2)
    for name in ("conversation", "plain text"):
        write_reward_model(folder / name, family="llama", num_hidden_layers=2, hidden_size=48)
        write_other_tokenizer(folder / name)
    (folder / "plain text" / "chat_template.jinja").unlink()
    rows = [{"prompt": f"{i}+2=", "answer": str(i + 2)} for i in range(8)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "key").write_text(KEY)
    (folder / "key").chmod(0o600)
    return folder


def score_of(item: dict[str, Any]) -> float:
    """What the service thinks of a response."""
    return len(item["response"]) + sum(map(ord, item["response"])) / 1000 - int(item["answer"]) / 7


def answer(_: int, post: Post) -> Answer:
    """Of the service, to one request."""
    return scores(*map(score_of, post.items))


def settings_of(root: Path, engine: str, source: str, url: str) -> list[str]:
    """Of one run."""
    service = [
        "reward.source=http",
        f"reward.source.url={url}",
        f"reward.source.key_file={root / 'key'}",
        "reward.source.batch_size=3",
    ]
    model = ["reward.source=model", f"reward.source.path={root / source}", "reward.source.attn_implementation=eager"]
    return [
        *(f"engine.backend={engine}", ENGINES[engine], *(service if source == "service" else model)),
        *(f"model.path={root / 'actor'}", "model.dtype=fp32", "optim.lr=1e-3", "algorithm.advantage=grpo"),
        *(f"data.train_files=[{root / 'train.jsonl'}]", "data.max_prompt_tokens=8"),
        *(
            "rollout.max_new_tokens=6",
            f"rollout.n={SAMPLES}",
            "metrics.rollout_interval=1",
            "metrics.tensorboard=false",
        ),
        *(f"trainer.steps={STEPS}", f"trainer.prompts_per_step={PROMPTS}", f"trainer.minibatch_size={PROMPTS}"),
        *("trainer.microbatch.max_tokens=64", "trainer.timeout_s=90", "trainer.device=cpu"),
        f"trainer.run_dir={root / f'{engine} {source}'}",
    ]


@pytest.fixture(scope="module")
def posts() -> list[Post]:
    """What the service has been sent in all runs."""
    return []


@pytest.fixture(scope="module")
def runs(root: Path, posts: list[Post]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """engine -> source -> what each rank found; the service is this process's."""
    actual = {}
    with serving(answer) as service:
        for engine in ENGINES:
            settings = {source: settings_of(root, engine, source, service.url) for source in SOURCES}
            ranks = run_ranks(2, run_all, settings, device="cpu")
            actual[engine] = {source: [rank[source] for rank in ranks] for source in SOURCES}
        posts += service.posts
    return actual


def rows_of(runs: dict[str, Any], engine: str, source: str, step: int) -> list[tuple[list[int], int, bool]]:
    """All rows of a step: those of each data-parallel rank."""
    first, second = (rank["rows"][step] for rank in runs[engine][source])
    if engine == "fsdp":
        return [*first, *second]
    assert first == second
    return list(first)


def expected_rewards(root: Path, source: str, rows: Sequence[tuple[list[int], int, bool]]) -> torch.Tensor:
    """[B] float32, by transformers alone, or by the service's own rule."""
    from transformers import AutoTokenizer

    if source == "own tokens":
        return transformers_scores(root / source, [tokens for tokens, _, _ in rows])
    actor = AutoTokenizer.from_pretrained(root / "actor")
    texts = [
        (actor.decode(tokens[:length]), actor.decode(tokens[length : len(tokens) - ended], skip_special_tokens=True))
        for tokens, length, ended in rows
    ]
    if source == "service":
        answers = [str(int(prompt[0]) + 2) for prompt, _ in texts]
        items = [{"response": text, "answer": known} for (_, text), known in zip(texts, answers, strict=True)]
        return torch.tensor([score_of(item) for item in items])
    judge = AutoTokenizer.from_pretrained(root / source)
    if source == "plain text":
        return transformers_scores(root / source, [judge(prompt + response).input_ids for prompt, response in texts])
    turns = [
        [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}] for prompt, response in texts
    ]
    return transformers_scores(root / source, [judge.apply_chat_template(turn, return_dict=False) for turn in turns])


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("engine", list(ENGINES))
def test_rewards_are_those_of_the_source(root: Path, runs: dict[str, Any], engine: str, source: str) -> None:
    """Row by row in the dumps of rank 0, and in the mean over all ranks."""
    records = list(read_metrics(root / f"{engine} {source}" / "metrics.jsonl"))
    assert len(records) == STEPS
    for step, record in enumerate(records):
        rows = rows_of(runs, engine, source, step)
        assert len(rows) == PROMPTS * SAMPLES
        expected = expected_rewards(root, source, rows)
        assert expected.unique().numel() > len(rows) // 2  # rows in another order would be seen
        assert abs(record.metrics["reward/mean"] - float(expected.mean())) < TOLERANCE
        dump = root / f"{engine} {source}" / "rollouts" / f"step_{step + 1:06d}.jsonl"
        dumped = [json.loads(line) for line in dump.read_text().splitlines()]
        assert len(dumped) == len(runs[engine][source][0]["rows"][step])
        actual = torch.tensor([row["reward"] for row in dumped])
        torch.testing.assert_close(actual, expected[: len(dumped)], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("source", SOURCES)
def test_both_engines_see_the_same(root: Path, runs: dict[str, Any], source: str) -> None:
    """Token for token, after an update too; so rewards and what is learnt from them agree."""
    by_engine = [list(read_metrics(root / f"{engine} {source}" / "metrics.jsonl")) for engine in ENGINES]
    for step, (megatron, fsdp) in enumerate(zip(*by_engine, strict=True)):
        assert rows_of(runs, "megatron", source, step) == rows_of(runs, "fsdp", source, step)
        assert abs(megatron.metrics["reward/mean"] - fsdp.metrics["reward/mean"]) < TOLERANCE
        assert megatron.metrics["reward/std"] > 0.01
        assert megatron.metrics["actor/grad_norm"] == pytest.approx(fsdp.metrics["actor/grad_norm"], rel=1e-4)


def test_the_service_sees_every_response_once(runs: dict[str, Any], posts: list[Post]) -> None:
    """In requests of three at most, with the key; the ranks of a replica share its rows."""
    sent = [(item["prompt"], item["response"], item["answer"]) for post in posts for item in post.items]
    assert len(sent) == len(ENGINES) * STEPS * PROMPTS * SAMPLES
    assert all(sent.count(one) % len(ENGINES) == 0 for one in sent)  # each engine's run samples the same
    assert {len(post.items) for post in posts} == {3, 1}  # 4 rows of each rank
    assert {post.headers["Authorization"] for post in posts} == {f"Bearer {KEY}"}
