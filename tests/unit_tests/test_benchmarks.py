"""The benchmarks as programs: each in its tiny form, and the driver that they share."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.helpers.selection import without
from tests.peers import package

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# Arguments besides --tiny, and the peers that a benchmark needs. device.py has a test file of its own.
PROGRAMS: dict[str, tuple[list[str], list[str]]] = {
    "ahead": ([], []),
    "checkpoint": ([], []),
    "converters": (["--only", "export dense TP2"], ["mbridge"]),
    "converters, all": ([], ["mbridge"]),
    "ddp": ([], []),
    "e2e": ([], ["trl"]),
    "engines": ([], []),
    "learning": ([], ["trl"]),
    "restart": ([], []),
    "reward_pool": ([], []),
    "stream": ([], []),
    "weight_sync": ([], []),
}
SPEAKS = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from driver import Commands
commands = Commands(Path(sys.argv[2]))
for command in commands:
    if command == "end":
        print("the last words of a contender", flush=True)
        sys.exit(3)
    if command == "speak":
        print("protocol? no: a library's own line")
        commands.answer({"said": command})
"""


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import driver  # type: ignore[import-not-found]

    return driver


# `make test` runs "engines"; the others are those of `make test-full`.
LONG = ("e2e", "converters", "converters, all", "learning", "restart", "checkpoint", "ddp", "reward_pool")
LONG += ("ahead", "stream", "weight_sync")


@pytest.mark.parametrize("name", without(PROGRAMS, *LONG))
def test_tiny_form_runs_to_its_end(name: str, tmp_path: Path) -> None:
    options, peers = PROGRAMS[name]
    for peer in peers:
        if missing := package.missing(peer):
            pytest.skip(missing)
    result = tmp_path / "result.json"
    program = [sys.executable, str(BENCHMARKS / f"{name.partition(',')[0]}.py"), "--tiny", "--json", str(result)]
    done = subprocess.run(
        [*program, *options], env=package.environment(), cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(result.read_text())
    if name != "learning":  # its file holds runs, for --join
        assert written["tiny"] is True
        assert {"date", "commit", "processor", "cores", "load"} <= written["about"].keys()
        assert written["samples"]


def contender(driver: Any, folder: Path) -> Any:
    program = folder / "speaks.py"
    program.write_text(SPEAKS)
    return driver.Contender("the peer", folder / "pipes", [str(program), str(BENCHMARKS), str(folder / "pipes")])


def test_contender_answers_by_its_pipe_only(driver: Any, tmp_path: Path) -> None:
    with contender(driver, tmp_path) as peer:
        assert peer.ask("speak", 30.0) == {"said": "speak"}
        assert peer.peak_bytes() > 1 << 20
    assert not psutil.pid_exists(peer.process.pid)


def test_dead_contender_ends_the_benchmark_with_its_last_lines(driver: Any, tmp_path: Path) -> None:
    with contender(driver, tmp_path) as peer, pytest.raises(SystemExit) as ended:
        peer.ask("end", 30.0)
    assert "the peer ended early, with exit code 3" in str(ended.value)
    assert "the last words of a contender" in str(ended.value)


def test_program_past_its_deadline_is_ended_with_its_children(driver: Any, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    child = "import subprocess, sys, time; print('waits', flush=True); time.sleep(600)"
    (program := tmp_path / "hangs.py").write_text(
        f"import subprocess, sys, pathlib\np = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        f"pathlib.Path({str(pid)!r}).write_text(str(p.pid))\np.wait()\n"
    )
    begin = time.monotonic()
    with pytest.raises(SystemExit, match=r"hangs.py did not end within 5 s; its last lines:\nwaits"):
        driver.run([str(program)], deadline_s=5.0)
    assert time.monotonic() - begin < 60
    assert not psutil.pid_exists(int(pid.read_text()))


@pytest.mark.parametrize(
    ("target", "load", "tiny", "wrong", "code"),
    [
        (2.0, 0.0, False, [], 0),
        (1.0, 0.0, False, [], 1),
        (1.0, 9.0, False, [], 2),
        (1.0, 9.0, True, [], 0),
        (2.0, 0.0, False, ["results differ"], 1),
        (2.0, 0.0, True, ["results differ"], 1),
    ],
)
def test_exit_code_tells_missed_void_and_wrong(
    driver: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    target: float,
    load: float,
    tiny: bool,
    wrong: list[str],
    code: int,
) -> None:
    monkeypatch.setattr(driver.os, "getloadavg", lambda: (load, load, load))
    report = driver.Report(SimpleNamespace(tiny=tiny, json=tmp_path / "result.json"))
    report.add(driver.compare("ours / theirs", [3.0, 3.0, 4.0], [2.0, 2.0, 2.0], target))
    report.wrong += wrong
    assert report.end() == code
    (figure,) = json.loads((tmp_path / "result.json").read_text())["figures"]
    assert figure == {"name": "ours / theirs", "median": 1.5, "low": 1.5, "high": 2.0, "target": target}


def test_pages_say_what_the_benchmarks_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import tables  # type: ignore[import-not-found]

    for page in tables.PAGES:
        text = page.read_text(encoding="utf-8")
        assert tables.written(text) == text, f"{page.name}: run `python benchmarks/tables.py`"
