"""The quickstart's sums: rows, reward, tokenizer and checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from mega_rl.cli.quickstart.inputs import write_fresh_model
from mega_rl.cli.quickstart.reward import points
from mega_rl.cli.quickstart.sums import TOKENS, Sums, make_sums


@pytest.fixture(scope="module")
def sums() -> Sums:
    return make_sums(3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    write_fresh_model(directory, TOKENS, seed=5)
    return directory


def operands(prompt: str) -> tuple[int, int]:
    assert len(prompt) == len("37+45=")
    left, right = prompt.removesuffix("=").split("+")
    return int(left), int(right)


def test_answers_are_sums_read_backwards(sums: Sums) -> None:
    for row in (*sums.train, *sums.held_out):
        assert int(row["answer"][::-1]) == sum(operands(row["prompt"]))
        assert len(row["answer"]) == 3


def test_held_out_sum_is_trained_in_neither_order(sums: Sums) -> None:
    assert (len(sums.held_out), len(sums.demonstrations)) == (256, 32_768)
    assert 10_000 - 2 * 256 <= len(sums.train) <= 10_000 - 256  # both orders of a held-out sum are left out
    train = {row["prompt"] for row in sums.train}
    assert len(train) == len(sums.train)
    assert {row["prompt"] for row in sums.demonstrations} <= train
    held_out = {frozenset(operands(row["prompt"])) for row in sums.held_out}
    assert len(held_out) == 256
    assert make_sums(3) == sums != make_sums(4)
    assert held_out.isdisjoint(frozenset(operands(prompt)) for prompt in train)


@pytest.mark.parametrize(
    ("prompt", "answer", "carries"),
    [("12+34=", "640", 0), ("37+45=", "280", 1), ("60+50=", "011", 1), ("57+45=", "201", 2), ("99+99=", "891", 2)],
)
def test_right_answer_earns_a_point_per_carry(prompt: str, answer: str, carries: int) -> None:
    assert points(prompt, answer, answer) == {"correct": 1.0, "carries": carries}
    for wrong in ("999", answer[:2], answer + "0", ""):
        assert points(prompt, wrong, answer) == {"correct": 0.0, "carries": 0.0}


def test_tokenizer_has_one_token_per_character(sums: Sums, checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    for row in sums.train[:50]:
        text = row["prompt"] + row["answer"]
        ids = tokenizer(text).input_ids
        assert ids == [TOKENS.names.index(character) for character in text]
        assert tokenizer.decode(ids) == text
    assert len(tokenizer) == len(TOKENS.names) == 16
    ids = tokenizer("12<eos><pad>").input_ids
    assert ids[2:] == [tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "12"
    assert tokenizer("1 a\n").input_ids[1:] == [tokenizer.unk_token_id] * 3


def test_checkpoint_loads_and_its_ids_agree(checkpoint: Path) -> None:
    _, report = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert not [*report["missing_keys"], *report["unexpected_keys"]]
    config, generation = AutoConfig.from_pretrained(checkpoint), GenerationConfig.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert config.eos_token_id == generation.eos_token_id == tokenizer.eos_token_id == TOKENS.names.index("<eos>")
    assert config.pad_token_id == generation.pad_token_id == tokenizer.pad_token_id == TOKENS.names.index("<pad>")
    assert config.vocab_size == len(tokenizer)
    sizes = (config.num_attention_heads, config.num_key_value_heads, config.num_hidden_layers, config.intermediate_size)
    assert all(size % 2 == 0 for size in (*sizes, config.vocab_size)), "two ranks share it both ways"
