"""Mistakes in what a run reads, through the real command: one line each, exit code 2, nothing written.

A mistake of each kind: test_preflight.py and data/test_prompts.py have the others.

What needs no torch is answered in this process; what is found later, in one process that takes case after case.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mega_rl.cli import app as cli
from tests.helpers.distributed import run_ranks
from tests.helpers.models import write_digit_tokenizer, write_tiny_checkpoint

ROOT = Path(__file__).parents[2]
ENGINES = ("megatron", "fsdp")
SETTINGS = (
    *("model.path=m", "model.dtype=fp32", "data.train_files=[d.jsonl]", "data.max_prompt_tokens=8"),
    *("rollout.max_new_tokens=4", "rollout.n=2", "algorithm.advantage=grpo", "trainer.microbatch.max_tokens=64"),
    *("trainer.prompts_per_step=4", "trainer.minibatch_size=4", "trainer.steps=2", "trainer.run_dir=run"),
    *("trainer.timeout_s=60", "metrics.tensorboard=false", "metrics.progress_bar=false", "rollout.temperature=1.0"),
)


@contextlib.contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Relative paths mean files of `folder`."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_rows(edit: Callable[[int, dict[str, object]], object]) -> None:
    """Replace each row of d.jsonl; strings are written as they are."""
    rows = [json.loads(line) for line in Path("d.jsonl").read_text().splitlines()]
    edited = [edit(number, row) for number, row in enumerate(rows, 1)]
    Path("d.jsonl").write_text("".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in edited))


def missing_directory() -> list[str]:
    shutil.rmtree("m")
    return []


def foreign_tokenizer() -> list[str]:
    write_digit_tokenizer(Path("m"), vocab_size=51)
    return []


def given(*settings: str) -> Callable[[], list[str]]:
    """Settings alone, over good files."""
    return lambda: list(settings)


EARLY: dict[str, tuple[Callable[[], list[str]], tuple[str, ...]]] = {
    "missing directory": (missing_directory, ("model.path: ", "m: ", "no such directory")),
    "foreign tokenizer": (foreign_tokenizer, ("the tokenizer has token id 50, the model a vocabulary of 50",)),
    "a layout under FSDP": (
        given("engine.backend=fsdp", "engine.megatron.tp=2", "--nproc-per-node=2"),
        ("engine.megatron.tp=2 has no effect: it needs engine.backend=megatron",),
    ),
}


def malformed_row() -> list[str]:
    edit_rows(lambda number, row: '{"prompt": "1+1="' if number == 3 else row)
    return []


def long_prompt() -> list[str]:
    edit_rows(lambda number, row: row | {"prompt": "1+2+3+4+5="} if number == 4 else row)
    return []


def reward_that_fails_to_import() -> list[str]:
    Path("r.py").write_text("import no_such_module\n\n\ndef score(prompt, response, answer):\n    return 1.0\n")
    return ["reward.function=r.py:score"]


def too_few_layers() -> list[str]:
    edit_json(Path("m/config.json"), num_hidden_layers=3, layer_types=["full_attention"] * 3)
    return []


def damaged_checkpoint() -> list[str]:
    Path("c/step_000001").mkdir(parents=True)
    Path("c/step_000001/manifest.json").write_text('{"step": 1,')
    Path("c/step_000001/COMMIT").write_text('{"manifest": "0123456789abcdef", "bytes": 11}\n')
    return ["checkpoint.resume=c/step_000001"]


def incomplete_checkpoint() -> list[str]:
    Path("c/actor").mkdir(parents=True)
    return ["checkpoint.resume=c"]


LATE: dict[str, tuple[Callable[[], list[str]], tuple[str, ...]]] = {
    "malformed row": (malformed_row, ("d.jsonl:3: is not JSON", "set data.malformed_rows=drop")),
    "long prompt": (long_prompt, ("d.jsonl:4: ", "10 tokens", "data.max_prompt_tokens")),
    "reward that fails to import": (reward_that_fails_to_import, ("r.py", "no_such_module")),
    "fewer layers than weights": (too_few_layers, ("model.layers.3.",)),
    "damaged checkpoint": (
        damaged_checkpoint,
        ("step_000001/manifest.json", "0123456789abcdef", "checkpoint.resume to another one"),
    ),
    **{
        f"FlashAttention on a CPU, engine={engine}": (
            given(f"engine.backend={engine}", "model.attn_implementation=flash_attention_2"),
            ("model.attn_implementation=flash_attention_2 cannot run in", "available here: auto, eager, sdpa"),
        )
        for engine in ENGINES
    },
    "incomplete checkpoint": (incomplete_checkpoint, ("checkpoint.resume=c: no complete checkpoint there",)),
}
NAN_REWARD = "def score(prompt, response, answer):\n    return float('nan') if answer == '5' else 1.0\n"


def nan_reward() -> list[str]:
    Path("r.py").write_text(NAN_REWARD)
    return ["reward.function=r.py:score", "data.shuffle=false"]


ESTIMATOR_THAT_RAISES = """from dataclasses import dataclass


@dataclass(frozen=True)
class Mine:
    def __call__(self, inputs):
        return {}["advantages"]
"""


def estimator_that_raises() -> list[str]:
    Path("a.py").write_text(ESTIMATOR_THAT_RAISES)
    return ["algorithm.advantage=a.py:Mine"]


def write_good_inputs(folder: Path) -> None:
    write_tiny_checkpoint(folder / "m", family="qwen3", tied=True)
    write_digit_tokenizer(folder / "m", vocab_size=50)
    rows = [{"prompt": f"{i}+2=", "answer": str(i + 2)} for i in range(6)]
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    write_good_inputs(folder)
    return folder


RUNS = {"nan reward": nan_reward, "estimator that raises": estimator_that_raises}


def run_case(make: Callable[[], list[str]], good: Path, folder: Path) -> tuple[int, str, bool]:
    """(exit code, all output, whether the run folder is there) of the command in a fresh folder."""
    shutil.copytree(good, folder)
    output = io.StringIO()
    with working_in(folder), contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
        code = cli.main(["train", *SETTINGS, *make()])
        return code, output.getvalue(), Path("run").exists()


def run_late_cases(rank: int, good: str, folder: str) -> dict[str, tuple[int, str, bool]]:
    """Every late case, runs that end by their own numbers or by the user's code, and good ones."""
    cases = {name: make for name, (make, _) in LATE.items()} | RUNS
    cases |= {engine: given(f"engine.backend={engine}") for engine in ENGINES}
    return {name: run_case(make, Path(good), Path(folder) / name) for name, make in cases.items()}


@pytest.fixture(scope="module")
def late(good: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, bool]]:
    return dict(run_ranks(1, run_late_cases, str(good), str(tmp_path_factory.mktemp("late")))[0])


def error_lines(output: str) -> list[str]:
    assert "Traceback" not in output
    lines = [line for line in output.splitlines() if line.startswith("error: ")]
    assert lines, output
    return lines


def check(result: tuple[int, str, bool], words: tuple[str, ...]) -> None:
    code, output, wrote = result
    message = "\n".join(error_lines(output))
    assert all(word in message for word in words), message
    assert (code, wrote) == (2, False)


@pytest.mark.parametrize("case", list(EARLY))
def test_mistakes_found_before_anything_starts(case: str, good: Path, tmp_path: Path) -> None:
    make, words = EARLY[case]
    result = run_case(make, good, tmp_path / "inputs")
    check(result, words)
    others = [line for line in result[1].splitlines() if not line.startswith("error: ")]
    assert len(others) <= 1, "beside errors there is the line of the check alone"


@pytest.mark.parametrize("case", list(LATE))
def test_mistakes_found_later(case: str, late: dict[str, tuple[int, str, bool]]) -> None:
    check(late[case], LATE[case][1])


@pytest.mark.parametrize("engine", ENGINES)
def test_the_inputs_are_good_without_the_mistake(late: dict[str, tuple[int, str, bool]], engine: str) -> None:
    """The run says once what it trains, and with which engine and attention."""
    code, output, wrote = late[engine]
    assert (code, wrote) == (0, True)
    assert "error" not in output
    (actor,) = [line.split() for line in output.splitlines() if line.startswith("actor ")]
    assert (actor[1], actor[-5:]) == ("qwen3", [engine, "sdpa", "fp32", "yes", "m"])


def test_a_run_that_cannot_go_on_ends_with_one_line(late: dict[str, tuple[int, str, bool]]) -> None:
    """Exit code 1; what was written before stays."""
    code, output, wrote = late["nan reward"]
    (line,) = error_lines(output)
    assert "the reward function returned nan" in line
    assert "'3+2='" in line
    assert (code, wrote) == (1, True)


def test_an_error_of_the_users_code_is_one_line(late: dict[str, tuple[int, str, bool]]) -> None:
    """With file and line in place of a traceback through the trainer."""
    code, output, wrote = late["estimator that raises"]
    (line,) = error_lines(output)
    assert line.startswith("error: your own code raised KeyError: 'advantages' (at /")
    assert line.endswith("/a.py:7 in __call__)")
    assert (code, wrote) == (1, True)


def test_two_ranks_say_it_once(good: Path, tmp_path: Path) -> None:
    """The NaN comes up on one of two data-parallel ranks: neither hangs, and the first speaks for both."""
    folder = tmp_path / "inputs"
    shutil.copytree(good, folder)
    with working_in(folder):
        arguments = [*SETTINGS, *nan_reward()]
    done = subprocess.run(
        [sys.executable, "-m", "mega_rl.cli", "train", "--nproc-per-node", "2", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=120,
    )
    (line,) = error_lines(done.stdout + done.stderr)
    assert "the reward function returned nan" in line
    assert done.returncode == 1, done.stderr
