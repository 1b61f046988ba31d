"""The quickstart's programs: problems, demonstrations, the folder as the Hub has it, and its recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mega_rl.config.loader import load
from mega_rl.errors import UserError
from mega_rl.quickstart.code_model import (
    BLOCK,
    MAX_POSITIONS,
    NUM_TEST,
    build_tokenizer,
    demonstrations,
    model_config,
    write_data,
)
from mega_rl.quickstart.code_problems import make_problems, write_folder
from mega_rl.rewards.code import code_format, read_cases
from tests.helpers.sandboxes import local_sandbox


def test_problems_are_different_and_those_of_the_seed() -> None:
    problems = make_problems(seed=3)
    assert len({problem.question for problem in problems}) == len(problems) > 200
    assert make_problems(seed=3) == problems != make_problems(seed=4)


def test_right_programs_pass_and_careless_ones_fail_a_case() -> None:
    sandbox = local_sandbox()
    for problem in {problem.kind: problem for problem in make_problems(seed=0)}.values():
        cases = read_cases(problem.tests)
        assert [case.run(sandbox, problem.program(), 5)[0] for case in cases] == [True, True]
        assert not all(case.run(sandbox, problem.program(careless=True), 5)[0] for case in cases)


def test_the_tokenizer_gives_every_text_back_and_the_recipe_has_room() -> None:
    tokenizer, config = build_tokenizer(), load(Path("quickstart_code"))
    for problem in make_problems(seed=0):
        for careless in (False, True):
            response = BLOCK.format(problem.program(careless=careless))
            ids = tokenizer.encode(response)
            assert tokenizer.unk_token_id not in ids
            assert tokenizer.decode(ids) == response
            assert len(ids) < config.rollout.max_new_tokens
            assert code_format(response) == 1.0
        assert tokenizer.unk_token_id not in tokenizer.encode(problem.question)
        assert len(tokenizer.encode(problem.question)) <= config.data.max_prompt_tokens
    assert config.data.max_prompt_tokens + config.rollout.max_new_tokens <= MAX_POSITIONS
    assert model_config().vocab_size % 8 == 0


def test_the_data_are_a_folder_of_the_hub_and_hold_no_test_problem_in_training(tmp_path: Path) -> None:
    write_data(tmp_path, seed=0)
    card = (tmp_path / "programs/README.md").read_text()
    rows = {
        split: [json.loads(line) for line in (tmp_path / f"programs/data/{split}.jsonl").read_text().splitlines()]
        for split in ("train", "test")
    }
    assert all(f"path: data/{split}.jsonl" in card for split in rows)
    assert len(rows["test"]) == NUM_TEST
    questions = {split: {row["question"] for row in rows[split]} for split in rows}
    assert not questions["train"] & questions["test"]
    lines = (tmp_path / "demonstrations.jsonl").read_text().splitlines()
    assert {json.loads(line)["prompt"] for line in lines} <= questions["train"]


def test_demonstrations_are_of_mixed_quality() -> None:
    rows = demonstrations(make_problems(seed=0), seed=0)
    in_blocks = sum(code_format(row["response"]) for row in rows[:2000]) / 2000
    assert 0.55 < in_blocks < 0.65


def test_a_folder_that_is_there_is_kept(tmp_path: Path) -> None:
    problems = {"train": make_problems(seed=0)[:2], "test": []}
    write_folder(tmp_path / "a", problems, seed=0)
    with pytest.raises(UserError, match="is there already"):
        write_folder(tmp_path / "a", problems, seed=0)
