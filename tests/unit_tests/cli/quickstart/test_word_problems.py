"""Word problems of the quickstart: questions with right solutions, a folder as the Hub has it, and a tokenizer."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from transformers import AutoTokenizer

from mega_rl.cli import app as cli
from mega_rl.cli.quickstart import word_problems
from mega_rl.cli.quickstart.inputs import write_fresh_model
from mega_rl.cli.quickstart.word_problems import (
    SENTENCE,
    TOKENS,
    calculate,
    careless,
    make_problems,
)
from mega_rl.config.loader import load
from mega_rl.errors import UserError
from mega_rl.rewards.builtin import has_final_answer, math_verify, number_match

PROBLEMS = make_problems(1000, seed=0)


def test_annotations_are_right_and_give_the_answer() -> None:
    """Computed once more from the text, and read by both built-in rewards from the column as it is."""
    for problem in PROBLEMS:
        solution = problem.solution(calculate)
        steps = re.findall(r"<<(\d+)([+*-])(\d+)=(\d+)>>(\d+) ", solution)
        assert len(steps) == len(problem.steps)
        for left, operator, right, annotated, result in steps:
            assert calculate(int(left), operator, int(right)) == int(annotated) == int(result) > 0
        numbers = list(map(int, re.findall(r"\d+", problem.question)))
        assert [int(steps[0][0]), *(int(right) for _, _, right, _, _ in steps)] == numbers
        assert solution.endswith(f"\n#### {steps[-1][3]}")
        assert number_match(f"It is {steps[-1][3]}.", solution) == has_final_answer(solution) == 1.0
    assert math_verify("", "#### 11", "7+8=<<7+8=15>>15\n15-4=<<15-4=11>>11\n#### 11") == 1.0


def test_questions_differ_and_have_all_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len({problem.question for problem in PROBLEMS}) == 1000
    kinds = Counter("".join(operator for operator, _ in problem.steps) for problem in PROBLEMS)
    assert kinds.keys() == {"+", "*", "++", "+-", "*+"}
    assert min(kinds.values()) > 100
    assert make_problems(20, seed=1) == make_problems(20, seed=1) != make_problems(20, seed=2)
    monkeypatch.setattr(word_problems, "MOST_REPEATED", 1)
    with pytest.raises(UserError, match="1000000 different questions are more than there are, about"):
        make_problems(1_000_000, seed=0)


def test_command_writes_a_folder_of_the_hub(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["data", "word-problems", str(tmp_path / "made"), "--train", "30", "--test", "5"]
    assert cli.main(command) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path}/made/main/train-00000-of-00001.parquet: 30 rows",
        f"{tmp_path}/made/main/test-00000-of-00001.parquet: 5 rows",
    ]
    _, head, _ = (tmp_path / "made/README.md").read_text().split("---\n")
    (config,) = yaml.safe_load(head)["configs"]
    assert config["config_name"] == "main"
    rows = {}
    for file in config["data_files"]:
        (path,) = (tmp_path / "made").glob(file["path"])
        rows[file["split"]] = pq.read_table(path).to_pylist()
    assert {split: len(of_split) for split, of_split in rows.items()} == {"train": 30, "test": 5}
    assert all(row.keys() == {"question", "answer"} for row in rows["train"])
    assert not {row["question"] for row in rows["train"]} & {row["question"] for row in rows["test"]}
    assert cli.main(command) == 2
    assert "README.md: is there already; name another folder, or give --force" in capsys.readouterr().err
    assert cli.main([*command, "--force"]) == 0


def test_tokenizer_gives_texts_back_within_the_recipe(tmp_path: Path) -> None:
    write_fresh_model(tmp_path, TOKENS, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    data, rollout = (config := load(Path("quickstart_gsm8k"))).data, config.rollout
    for problem in PROBLEMS:
        question = tokenizer.encode(problem.question)
        assert tokenizer.unk_token_id not in question
        assert len(question) <= data.max_prompt_tokens
        for arithmetic in (calculate, careless):
            for ending in ("#### {}", SENTENCE):
                solution = problem.solution(arithmetic, ending=ending)
                token_ids = tokenizer.encode(solution)
                assert tokenizer.decode(token_ids) == solution
                assert tokenizer.unk_token_id not in token_ids
                assert len(token_ids) < rollout.max_new_tokens
    assert data.max_prompt_tokens + rollout.max_new_tokens <= TOKENS.max_positions
    assert len(tokenizer) % 8 == 0
