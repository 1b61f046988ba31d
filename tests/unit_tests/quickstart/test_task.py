"""The quickstart's task, tokenizer and checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from mega_rl.errors import UserError
from mega_rl.quickstart.reward import points
from mega_rl.quickstart.task import (
    NUM_DIGITS,
    VOCABULARY,
    Task,
    add,
    add_without_carry,
    build_tokenizer,
    make_task,
    model_config,
    write_checkpoint,
    write_dataset,
)
from mega_rl.rewards.builtin import resolve

PROMPT_TOKENS = 2 * NUM_DIGITS + 2  # the operands, "+" and "="
RESPONSE_TOKENS = NUM_DIGITS + 2  # one digit more than an operand has, and the end of sequence


@pytest.fixture(scope="module")
def task() -> Task:
    return make_task(3)


def _all_prompts(task: Task) -> list[str]:
    return [row.prompt for rows in (task.train, task.held_out, task.demonstrations) for row in rows]


def _rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# --- the task


def _operands(prompt: str) -> tuple[int, int]:
    left, right = prompt.removesuffix("=").split("+")
    return int(left), int(right)


@pytest.mark.parametrize(
    ("left", "right", "total", "forgetful"),
    [
        (37, 45, "280", "270"),
        (12, 34, "640", "640"),
        (99, 99, "891", "880"),
        (0, 7, "700", "700"),
        (60, 50, "011", "010"),
    ],
)
def test_the_two_habits_by_hand(left: int, right: int, total: str, forgetful: str) -> None:
    assert add(left, right) == total
    assert add_without_carry(left, right) == forgetful


def test_sizes_and_shapes_of_the_default_task(task: Task) -> None:
    assert (len(task.held_out), len(task.demonstrations)) == (256, 32_768)
    assert 10_000 - 2 * 256 <= len(task.train) <= 10_000 - 256  # both orders of a held-out sum are left out
    for prompt in _all_prompts(task):
        assert len(prompt) == PROMPT_TOKENS
        assert all(0 <= operand <= 99 for operand in _operands(prompt))
    assert {len(row.answer) for row in task.train} == {RESPONSE_TOKENS - 1}


def test_answers_are_the_sums_read_backwards(task: Task) -> None:
    for row in (*task.train, *task.held_out):
        assert int(row.answer[::-1]) == sum(_operands(row.prompt))


def test_every_sum_is_held_out_or_trained_on_once(task: Task) -> None:
    trained, held_out = [row.prompt for row in task.train], [row.prompt for row in task.held_out]
    assert len(set(trained)) == len(trained)
    assert set(trained).isdisjoint(held_out)
    assert {row.prompt for row in task.demonstrations} <= set(trained)


def test_no_held_out_sum_is_trained_on_in_either_order(task: Task) -> None:
    held_out = [frozenset(_operands(row.prompt)) for row in task.held_out]
    trained = {frozenset(_operands(row.prompt)) for row in (*task.train, *task.demonstrations)}
    assert len(set(held_out)) == len(held_out)
    assert trained.isdisjoint(held_out)


def _habits_differ(prompt: str) -> bool:
    return add(*_operands(prompt)) != add_without_carry(*_operands(prompt))


def test_demonstrations_are_right_or_forgetful_in_the_asked_proportion(task: Task) -> None:
    telling = [row for row in task.demonstrations if _habits_differ(row.prompt)]
    right = sum(row.response == add(*_operands(row.prompt)) for row in telling)
    wrong = sum(row.response == add_without_carry(*_operands(row.prompt)) for row in telling)
    assert right + wrong == len(telling) > 20_000
    # Five standard deviations of a binomial proportion with p=0.3 and at least 20 000 draws are 0.016.
    assert right / len(telling) == pytest.approx(0.3, abs=0.016)


def test_the_wrong_habit_is_mostly_wrong_on_held_out_prompts(task: Task) -> None:
    harmless = sum(not _habits_differ(row.prompt) for row in task.held_out)
    assert 0.15 < harmless / len(task.held_out) < 0.45  # 0.30 on average: below the half a warm start may reach


@pytest.mark.parametrize("right_fraction", [0.0, 1.0])
def test_extreme_fractions_give_one_habit_only(right_fraction: float) -> None:
    habit = add if right_fraction else add_without_carry
    rows = make_task(0, num_demonstrations=500, right_fraction=right_fraction).demonstrations
    assert all(row.response == habit(*_operands(row.prompt)) for row in rows)


def test_a_seed_fixes_the_task_and_another_changes_it(task: Task) -> None:
    assert make_task(3) == task
    other = make_task(4)
    assert other.held_out != task.held_out
    assert other.train != task.train


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"num_held_out": -1}, ("num_held_out=-1", "below 1")),
        ({"num_demonstrations": 0}, ("num_demonstrations=0", "below 1")),
        ({"right_fraction": 1.5}, ("right_fraction=1.5", "from 0 to 1")),
        ({"num_held_out": 5050}, ("num_held_out=5050", "at most 5049")),
    ],
)
def test_impossible_sizes_name_the_setting_and_the_fix(sizes: dict[str, int], words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        make_task(0, **sizes)
    assert all(word in str(caught.value) for word in words)


# --- the reward


@pytest.mark.parametrize(
    ("prompt", "answer", "carries"),
    [("12+34=", "640", 0), ("37+45=", "280", 1), ("60+50=", "011", 1), ("57+45=", "201", 2), ("99+99=", "891", 2)],
)
def test_a_right_answer_earns_a_point_and_one_for_every_carry(prompt: str, answer: str, carries: int) -> None:
    assert points(prompt, answer, answer) == {"correct": 1.0, "carries": carries}
    for wrong in ("999", answer[:2], answer + "0", ""):
        assert points(prompt, wrong, answer) == {"correct": 0.0, "carries": 0.0}


def _digit_sum(number: int) -> int:
    return sum(map(int, str(number)))


def test_carries_are_what_the_digits_of_the_result_lack(task: Task) -> None:
    """A carry turns ten units of one digit into one unit of the next: the sum of all digits loses nine."""
    for row in task.held_out:
        left, right = _operands(row.prompt)
        lost = _digit_sum(left) + _digit_sum(right) - _digit_sum(left + right)
        assert points(row.prompt, row.answer, row.answer)["carries"] == lost / 9


# --- files


def test_dataset_files_hold_the_rows_in_order(tmp_path: Path) -> None:
    task = make_task(1, num_held_out=10, num_demonstrations=30)
    files = write_dataset(tmp_path / "new" / "folder", task)
    assert _rows(files.train) == [{"prompt": row.prompt, "answer": row.answer} for row in task.train]
    assert _rows(files.held_out) == [{"prompt": row.prompt, "answer": row.answer} for row in task.held_out]
    assert _rows(files.demonstrations) == [
        {"prompt": row.prompt, "response": row.response} for row in task.demonstrations
    ]
    assert resolve(f"{files.reward}:points")("37+45=", "280", "280") == {"correct": 1.0, "carries": 1.0}


# --- tokenizer


def test_one_token_per_character_and_back(task: Task) -> None:
    tokenizer = build_tokenizer()
    for row in task.train[:50]:
        text = row.prompt + row.answer
        ids = tokenizer(text).input_ids
        assert ids == [VOCABULARY.index(character) for character in text]
        assert tokenizer.decode(ids) == text
    assert len(tokenizer) == len(VOCABULARY) == 16
    assert len(tokenizer(task.train[0].answer + "<eos>").input_ids) == RESPONSE_TOKENS


def test_special_tokens_are_dropped_on_decoding_and_unknown_text_is_unk() -> None:
    tokenizer = build_tokenizer()
    ids = tokenizer("12<eos><pad>").input_ids
    assert ids[2:] == [tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "12"
    assert tokenizer("1 a\n").input_ids[1:] == [tokenizer.unk_token_id] * 3


# --- checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(directory, seed=5)
    return directory


def test_checkpoint_loads_through_the_auto_classes(checkpoint: Path) -> None:
    model, report = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer("37+45=", return_tensors="pt").input_ids
    assert ids.tolist() == build_tokenizer()("37+45=", return_tensors="pt").input_ids.tolist()
    response = model.generate(ids, max_new_tokens=2, do_sample=False)
    assert 7 <= response.shape[1] <= 8


def test_special_ids_agree_everywhere(checkpoint: Path) -> None:
    config = AutoConfig.from_pretrained(checkpoint)
    generation = GenerationConfig.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert config.eos_token_id == generation.eos_token_id == tokenizer.eos_token_id == VOCABULARY.index("<eos>")
    assert config.pad_token_id == generation.pad_token_id == tokenizer.pad_token_id == VOCABULARY.index("<pad>")
    assert config.vocab_size == len(tokenizer)


def test_the_model_can_be_cut_in_two_both_ways() -> None:
    config = model_config()
    for size in (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.num_hidden_layers,
        config.intermediate_size,
        config.vocab_size,
    ):
        assert size % 2 == 0


def test_the_seed_fixes_the_weights_and_nothing_else_is_disturbed(checkpoint: Path, tmp_path: Path) -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    write_checkpoint(tmp_path / "same", seed=5)
    assert torch.equal(torch.rand(3), expected)
    write_checkpoint(tmp_path / "other", seed=6)
    weights = (checkpoint / "model.safetensors").read_bytes()
    assert (tmp_path / "same" / "model.safetensors").read_bytes() == weights
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != weights


def test_loading_says_nothing_on_standard_error(checkpoint: Path) -> None:
    """In a fresh process, because the libraries give most warnings only once."""
    code = "import sys\nfrom transformers import AutoTokenizer\nAutoTokenizer.from_pretrained(sys.argv[1])('37+45=')\n"
    done = subprocess.run([sys.executable, "-c", code, str(checkpoint)], capture_output=True, text=True, check=True)
    assert done.stderr == ""
