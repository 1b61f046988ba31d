"""`mega-rl quickstart` around its two trainings: its folder, what it starts, and what it says when one fails."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from mega_rl.cli import app as cli
from mega_rl.cli.quickstart import run
from mega_rl.config.loader import load
from mega_rl.config.packaged import file_of
from mega_rl.data.hub import folder_name
from mega_rl.errors import UserError
from mega_rl.operations.launcher.launch import Launch
from mega_rl.parallel.accelerator.base import environment_of_ranks

UNKNOWN = f"'math' is not one of {', '.join(map(repr, run.TASKS))}."


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Programs of ranks, each ending at once with code 0, in a working directory without a source tree."""
    commands: list[list[str]] = []

    def start(settings: Launch, *, variables: Mapping[str, str]) -> int:
        assert (settings.nproc_per_node, settings.max_restarts) == (2, 0)
        assert variables == environment_of_ranks(2), "a single GPU would be an error on two ranks"
        commands.append(list(settings.program))
        if settings.program[1] == "sft":
            steps = next(text for text in settings.program if text.startswith("trainer.steps="))
            written = Path(settings.run_dir, "warm_start", "hf", f"step_{int(steps.partition('=')[2]):06d}", "weights")
            written.parent.mkdir(parents=True)
            written.touch()
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "start_ranks", start)
    monkeypatch.setattr(run, "write_fresh_model", lambda folder, tokens, seed: folder.mkdir())
    monkeypatch.setattr("mega_rl.cli.quickstart.run.summarize", lambda run_dir, **_: None)
    monkeypatch.setattr(run, "report", lambda runs: commands.append(["report", *map(str, runs)]))
    return commands


@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
def test_both_trainings_run_the_packaged_recipe(engine: str, started: list[list[str]]) -> None:
    assert cli.main(["quickstart", "--engine", engine, "--seed", "3", "--run-dir", "a, b"]) == 0
    assert [command[0] for command in started] == ["mega_rl.cli", "mega_rl.cli", "report"]
    warm_start, train, reported = (command[1:] for command in started)
    assert warm_start[0] == "sft"
    supervised = load(None, ["algorithm.kind=sft", *warm_start[1:]])
    assert (supervised.engine.backend, supervised.engine.megatron.tp) == ("megatron", 2), "the same for both engines"
    assert (supervised.model.path, supervised.trainer.run_dir) == ("a, b/fresh_model", "a, b/warm_start")
    assert (supervised.trainer.seed, supervised.trainer.steps) == (3, 400)
    assert Path("a, b/model/weights").is_file()
    assert reported == ["a, b"]
    assert train[:3] == ["train", "--config", "quickstart"]
    config = load(Path("quickstart"), train[3:])
    assert (config.engine.backend, config.engine.megatron.tp) == (engine, 2 if engine == "megatron" else 1)
    assert (config.trainer.run_dir, config.trainer.seed, config.model.path) == ("a, b", 3, "a, b/model")
    assert Path(config.data.train_files[0]).is_file()
    assert Path(config.data.val_files[0]).is_file()
    file, _, function = config.reward.function.rpartition(":")
    assert (Path(file), function) == (Path("a, b/data/reward.py"), "points")
    assert Path(file).is_file()


def test_word_problems_are_read_from_a_hub_folder(started: list[list[str]]) -> None:
    """In two parts of a reward, with pass@k; the recipe names the folders that the quickstart writes."""
    assert cli.main(["quickstart", "--task", "gsm8k"]) == 0
    warm_start, train, reported = started
    assert "trainer.steps=250" in warm_start
    assert reported == ["report", "runs/quickstart_gsm8k"]
    config = load(Path("quickstart_gsm8k"), train[4:])
    assert config == load(file_of("quickstart_gsm8k"), ["checkpoint.resume=never"])
    assert config.reward.functions == {"correct": "number_match", "format": "has_final_answer"}
    assert config.validation.counted == (1, 4)
    for (text,), split in ((config.data.train_files, "train"), (config.data.val_files, "test")):
        name = folder_name(text)
        assert name is not None
        assert (name.config, name.split) == ("main", split)
        assert list(Path(name.folder, "main").glob(f"{split}-*.parquet"))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        (
            "--task",
            "math",
            f"Invalid value for '--task': Value error, {UNKNOWN}; see mega-rl --help",
        ),
        ("--engine", "jax", "engine.backend='jax': must be one of megatron, fsdp"),
    ],
)
def test_mistake_writes_nothing(
    option: str, value: str, message: str, started: list[list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["quickstart", option, value]) == 2
    assert capfd.readouterr().err == f"error: {message}\n"
    assert not [*started, *Path().iterdir()]


def test_earlier_quickstart_keeps_its_runs(started: list[list[str]]) -> None:
    assert cli.main(["quickstart", "--run-dir", "q"]) == 0
    checkpoint, weights = Path("q/checkpoints/step_000060/shard"), Path("q/model/old.safetensors")
    for file in (checkpoint, weights):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    assert cli.main(["quickstart", "--run-dir", "q"]) == 0
    assert checkpoint.is_file()
    assert not weights.exists()
    assert load(Path("quickstart"), started[-2][4:]).checkpoint.resume == "never", "training moves it aside"


@pytest.mark.parametrize("name", ["notes.txt", "data/mine.jsonl"])
def test_folder_of_other_files_is_refused(
    name: str, started: list[list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    file = Path("work", name)
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    assert cli.main(["quickstart", "--run-dir", "work"]) == 2
    line = "--run-dir=work: holds files that no quickstart wrote; give another folder or empty it"
    assert capfd.readouterr().err == f"error: {line}\n"
    assert file.read_text() == "mine"
    assert not started
    with pytest.raises(UserError, match=f"--run-dir={file}: cannot be made: "):
        run.prepare_folder(file)


def test_failed_training_ends_the_quickstart(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "start_ranks", lambda *_, **__: 2)
    assert cli.main(["quickstart"]) == 1
    line = "mega-rl sft ended with exit code 2; its messages stand above"
    assert capfd.readouterr().err.endswith(f"error: {line}\n")
