"""The quickstart's programs: problems, demonstrations, the folder as the Hub has it, and its recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from mega_rl.cli.quickstart.inputs import write_fresh_model
from mega_rl.cli.quickstart.programs import BLOCK, NUM_TEST, TOKENS, make_problems, write_data
from mega_rl.config.loader import load
from mega_rl.errors import UserError
from mega_rl.rewards.code import code_format, read_cases
from tests.helpers.sandboxes import local_sandbox

PROBLEMS = make_problems(seed=0)


def test_right_programs_pass_and_careless_ones_fail() -> None:
    sandbox = local_sandbox()
    for problem in {problem.kind: problem for problem in PROBLEMS}.values():
        cases = read_cases(problem.row["tests"])
        assert [case.run(sandbox, problem.program(), 5) for case in cases] == [True, True]
        assert not all(case.run(sandbox, problem.program(careless=True), 5) for case in cases)


def test_tokenizer_gives_texts_back_within_the_recipe(tmp_path: Path) -> None:
    write_fresh_model(tmp_path, TOKENS, seed=0)
    tokenizer, config = AutoTokenizer.from_pretrained(tmp_path), load(Path("quickstart_code"))
    for problem in PROBLEMS:
        for careless in (False, True):
            response = BLOCK.format(problem.program(careless=careless))
            ids = tokenizer.encode(response)
            assert tokenizer.unk_token_id not in ids
            assert tokenizer.decode(ids) == response
            assert len(ids) < config.rollout.max_new_tokens
            assert code_format(response) == 1.0
        question = tokenizer.encode(problem.row["question"])
        assert tokenizer.unk_token_id not in question
        assert len(question) <= config.data.max_prompt_tokens
    assert config.data.max_prompt_tokens + config.rollout.max_new_tokens <= TOKENS.max_positions
    assert len(tokenizer) % 8 == 0


def test_data_are_a_folder_of_the_hub(tmp_path: Path) -> None:
    write_data(tmp_path, seed=0)
    card = (tmp_path / "programs/README.md").read_text()
    questions = {}
    for split in ("train", "test"):
        name = f"main/{split}-00000-of-00001.parquet"
        questions[split] = {row["question"] for row in pq.read_table(tmp_path / "programs" / name).to_pylist()}
        assert f"path: {name}" in card
    assert len(questions["test"]) == NUM_TEST
    assert not questions["train"] & questions["test"]
    lines = (tmp_path / "demonstrations.jsonl").read_text().splitlines()
    assert {json.loads(line)["prompt"] for line in lines} <= questions["train"]
    with pytest.raises(UserError, match="is there already"):
        write_data(tmp_path, seed=0)
