from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from mega_rl.cli import app as cli
from mega_rl.config import packaged
from mega_rl.config.schema import Config
from mega_rl.config.user_files import load_from_file
from mega_rl.errors import UserError
from mega_rl.operations.launcher.launch import Launch
from mega_rl.operations.launcher.supervisor import DEFAULT_RESTARTS
from mega_rl.tracking.health.records import BY_OTHERS, LOST_PEER_CODE
from tests.helpers.inputs import qwen3_config, write_checkpoint, write_prompts

ROOT = Path(__file__).parents[3]
LOGGED = re.compile(r"\d\d:\d\d:\d\d ")  # a line of the log, whatever it says
GOOD = ("model.path=m", "data.train_files=[d.jsonl]")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a checkpoint m and a data file d.jsonl; no launcher."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    write_checkpoint(tmp_path / "m", qwen3_config())
    write_prompts(tmp_path / "d.jsonl")
    Path("twice.yaml").write_text("trainer:\n  steps: 1\n  steps: 2\n")
    return tmp_path


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configs that reached the run, in place of runs."""
    reached: list[Config] = []
    assemble = ModuleType("mega_rl.trainer.assemble")

    def run(config: Config, accelerator: object, investigate: object) -> int:
        reached.append(config)
        return 0

    assemble.train = run  # type: ignore[attr-defined]
    monkeypatch.setattr("mega_rl.parallel.accelerator.prepare", lambda device, variables, deepep: device)
    monkeypatch.setitem(sys.modules, "mega_rl.trainer.assemble", assemble)
    return reached


# One of each kind; tests/unit_tests/config and test_bad_inputs.py have the others.
BAD_CONFIGS: list[tuple[str, str]] = [
    ("optim.learning_rate=1", "optim.learning_rate: unknown key; TRL's learning_rate is optim.lr here"),
    ("nonsense", "override 'nonsense': needs the form section.key=value"),
    (
        "--config nope.yaml",
        "recipe 'nope.yaml' does not exist, as a file or as a packaged recipe; packaged recipes: "
        + ", ".join(packaged.names()),
    ),
    ("--config twice.yaml", "recipe twice.yaml: line 3: steps is given twice; keep one"),
    (
        "engine.megatron.tp=2",
        "world size 1 is not a multiple of engine.megatron.tp*pp*cp=2*1*1=2; "
        "start a multiple of 2 ranks (--nproc-per-node 2), or choose sizes whose product divides 1",
    ),
    ("data.train_files=[x.jsonl]", "data.train_files: x.jsonl: no such file (looked for FOLDER/x.jsonl)"),
]


def assert_one_line(code: int, out: str, err: str, line: str, *, expected: int = 2) -> None:
    assert code == expected
    assert [said for said in err.splitlines() if not LOGGED.match(said)] == [f"error: {line}"]
    assert out == ""


@pytest.mark.parametrize(("arguments", "line"), BAD_CONFIGS)
def test_bad_config_is_one_line(
    arguments: str, line: str, capfd: pytest.CaptureFixture[str], runs: list[Config]
) -> None:
    code = cli.main(["train", *GOOD, *arguments.split()])
    assert_one_line(code, *capfd.readouterr(), line.replace("FOLDER", str(Path.cwd())))
    assert not runs


@pytest.mark.parametrize("program", [("-m", "mega_rl.cli", "train"), (str(ROOT / "scripts/train_ppo_megatron.py"),)])
def test_whole_process_says_one_line(program: Sequence[str]) -> None:
    arguments, line = next(one for one in BAD_CONFIGS if one[0] == "engine.megatron.tp=2")
    done = subprocess.run(
        [sys.executable, *program, *GOOD, *arguments.split()],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
    )
    assert_one_line(done.returncode, done.stdout, done.stderr, line)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["nothing"], "No such command 'nothing'.; see mega-rl --help"),
        (["train", "--nope"], "No such option: --nope (Possible options: --nnodes); see mega-rl --help"),
    ],
)
def test_bad_command_lines(arguments: list[str], line: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert_one_line(cli.main(arguments), *capfd.readouterr(), line)


def test_answers_without_torch() -> None:
    code = """
    import sys
    from mega_rl.cli import app as cli
    commands = [["--help"], ["train", "optim.lr=x"], ["train", "model.path=m"], ["train", "--print-config"]]
    commands += [["--version"], ["recipes"], ["quickstart", "--help"]]
    codes = [cli.main(command) for command in commands]
    heavy = {"torch", "transformers", "datasets", "numpy", "megatron", "tensordict"} & set(sys.modules)
    print(codes, heavy, file=sys.stderr)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stderr.splitlines()[-1] == "[0, 2, 2, 0, 0, 0, 0] set()"


def test_more_ranks_become_a_launcher(runs: list[Config], monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, list[str], dict[str, str]]] = []

    def execve(path: str, arguments: list[str], environment: dict[str, str]) -> None:
        started.append((path, arguments, environment))
        raise SystemExit(7)  # the real one does not come back

    monkeypatch.setattr(os, "execve", execve)
    Path("r.yaml").write_text("trainer:\n  steps: 3\n")
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        with pytest.raises(SystemExit):
            cli.main(["train", "--config", "r.yaml", "--nproc-per-node", "2", *GOOD, "engine.megatron.tp=2"])
    finally:
        blocked = signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert signal.SIGTERM in blocked, "a signal waits until the launcher takes it"
    ((path, arguments, _),) = started
    assert path == sys.executable
    assert arguments[1:4] == ["-P", "-m", "mega_rl.cli.launch"]
    assert Launch.parse(arguments[4]) == Launch(
        program=("mega_rl.cli", "train", "--config", "r.yaml", *GOOD, "engine.megatron.tp=2"),
        nproc_per_node=2,
        max_restarts=DEFAULT_RESTARTS,
        run_dir="runs/default",
    )
    assert not runs


def test_end_of_a_run_decides_the_exit_code(
    runs: list[Config], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def end(outcome: int | BaseException) -> int:
        def run(config: Config, accelerator: object, investigate: object) -> int:
            if isinstance(outcome, int):
                return outcome
            raise outcome

        monkeypatch.setattr(sys.modules["mega_rl.trainer.assemble"], "train", run)
        return cli.main(["train", *GOOD])

    assert end(143) == 143
    capfd.readouterr()
    assert_one_line(end(UserError("row 3:\nmalformed")), *capfd.readouterr(), "row 3: malformed")
    assert end(KeyboardInterrupt()) == 130
    gloo = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:4711"
    assert end(RuntimeError(gloo)) == 1
    err = capfd.readouterr().err
    assert "Traceback" not in err
    assert err.endswith(f"error: {BY_OTHERS[LOST_PEER_CODE]}\n")
    with pytest.raises(ValueError, match="a bug"):  # our own bugs keep their traceback
        end(ValueError("a bug"))


def test_error_of_a_users_file_names_its_place(
    runs: list[Config], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "agent.py"
    file.write_text(
        "import json\n"
        "def answers(row): return json.loads(row)['answers']\n"
        "def no_problems(): import mega_rl.errors; mega_rl.errors.UserErrors([])\n"
    )

    def run_with(name: str, *given: object) -> None:
        function = load_from_file(f"{file}:{name}", key="rollout.source", kind="function")
        monkeypatch.setattr(
            sys.modules["mega_rl.trainer.assemble"], "train", lambda config, accelerator, investigate: function(*given)
        )

    run_with("answers", "{}")
    line = f"your own code raised KeyError: 'answers' (at {file}:2 in answers)"
    assert_one_line(cli.main(["train", *GOOD]), *capfd.readouterr(), line, expected=1)
    run_with("answers", "no JSON")  # raised in a library
    line = f"your own code raised JSONDecodeError: Expecting value: line 1 column 1 (char 0) (at {file}:2 in answers)"
    assert_one_line(cli.main(["train", *GOOD]), *capfd.readouterr(), line, expected=1)
    run_with("no_problems")  # raised in this package
    with pytest.raises(AssertionError, match="at least one problem"):
        cli.main(["train", *GOOD])


def test_other_ranks_speak_late(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    slept: list[float] = []
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("time.sleep", slept.append)
    try:
        assert cli.main(["train", "nonsense"]) == 2
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    assert slept == [cli.OTHER_RANKS_WAIT_S]
    assert capfd.readouterr().err == "error: rank 1: override 'nonsense': needs the form section.key=value\n"
