"""`mega-rl data show`: sets, shares, epochs and first prompts of a recipe, in memory and streamed; mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from mega_rl.cli.app import main
from tests.helpers.models import write_digit_tokenizer, write_tiny_checkpoint

RECIPE = """
model: {path: m}
algorithm: {advantage: grpo}
data:
  max_prompt_tokens: 8
  mixture:
    sources:
      sums: {files: [sums.jsonl], weight: 3}
      words: {files: [words.jsonl, more.jsonl], weight: 1, prompt_key: question}
validation: {sets: {held: sums.jsonl}}
rollout: {n: 2}
reward: {function: math_verify}
trainer: {steps: 8, prompts_per_step: 4, minibatch_size: 4, val_interval: 4}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_tiny_checkpoint(Path("m"), num_hidden_layers=1)
    write_digit_tokenizer(Path("m"), vocab_size=50)
    for name, key in {"sums": "prompt", "words": "question", "more": "question"}.items():
        rows = [{key: f"{n}+{len(name)}", "answer": str(n)} for n in range(6)]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("mix.yaml").write_text(RECIPE)


def ids(text: str) -> str:
    tokenizer = AutoTokenizer.from_pretrained("m")
    return " ".join(map(str, tokenizer(text, add_special_tokens=False)["input_ids"]))


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["data", "show", "mix.yaml", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if line.strip()]


def test_a_mixture_is_shown_with_what_the_run_draws(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, "--prompts", "1")
    assert [line.split() for line in lines[:6]] == [
        ["set", "prompts", "mean", "tokens", "longest", "weight", "share", "draws", "epochs"],
        ["sums", "6", "3", "3", "3", "75.0%", "24", "4"],
        ["words", "12", "3", "3", "1", "25.0%", "8", "0.667"],
        ["all", "18", "3", "3", "100.0%", "32", "1.78"],
        ["held", "6", "3", "3"],
        ["8", "steps", "of", "4", "prompts", "are", "32", "draws"],
    ]
    assert lines[6:10] == ["sums:", "  1. 0+4", f"     last token ids: {ids('0+4')}", "     answer: 0"]
    assert "held (validation):" in lines


def test_epochs_and_a_temperature_decide_as_in_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    sources = "data.mixture.sources={sums: {files: [sums.jsonl]}, more: {files: [more.jsonl], prompt_key: question}}"
    lines = shown(capsys, sources, "data.mixture.temperature=2", "trainer.epochs=3", "trainer.steps=100")
    assert ["sums", "6", "3", "3", "50.0%", "18", "3"] in [line.split() for line in lines]
    assert "9 steps of 4 prompts are 36 draws" in lines


def test_control_tokens_in_a_message_are_counted(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    Path("m/chat_template.jinja").write_text(template)
    rows = [{"prompt": [{"role": "user", "content": text}], "answer": "1"} for text in ("1", "1<pad>", "<pad>2", "3")]
    Path("control.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown(capsys, "data.mixture.sources={a: {files: [control.jsonl]}}", "validation.sets={}", "trainer.val_interval=0")
    assert (
        "2 of 4 prompts hold control tokens of the tokenizer in the text of a message, as <pad>; the model"
        in caplog.text
    )


def test_mistakes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    Path("sums.jsonl").unlink()
    assert main(["data", "show", "mix.yaml"]) == 2
    error = capsys.readouterr().err
    assert "data.mixture.sources.sums: sums.jsonl: no such file" in error
    assert "validation.sets.held: sums.jsonl: no such file" in error
