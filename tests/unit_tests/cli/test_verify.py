"""`mega-rl verify` from the command line: the table, JSON, exit codes, and what is said of mistakes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from mega_rl.cli import verify as verbs
from mega_rl.cli.app import main
from mega_rl.errors import RunError
from mega_rl.verify import launcher
from mega_rl.verify.launcher import RanksFailed, run_ranks
from mega_rl.verify.layouts import ALL
from mega_rl.verify.twin import write_random_twin
from tests.helpers.models import write_tiny_checkpoint
from tests.unit_tests.converters.tiny_configs import TINY
from tests.unit_tests.verify.cases import bare_config, forked_ranks

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny checkpoint with weights."""
    write_random_twin(bare_config(tmp_path / "bare", TINY["qwen3"]), tmp_path / "model", multiple=4)
    return tmp_path / "model"


def run(capsys: pytest.CaptureFixture[str], *arguments: object, verb: str = "layouts") -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `mega-rl verify`."""
    code = main(["verify", verb, *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_table_for_people(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0; every layout with its ranks and verdict, the steps on stderr."""
    code, out, err = run(capsys, "--model", model, "--layouts", "tp2+sp,vpp2", "--no-packing")
    assert code == 0, out + err
    for text in ("tp2+sp", "vpp2 (pp2)", "log-prob error", "worst gradient", "tolerances: ", "device: "):
        assert text in out
    assert out.count("equal") == 2
    assert "1 rank: reference" in err
    assert "2 ranks: tp2+sp, vpp2" in err


@pytest.mark.usefixtures("forked")
def test_a_bare_config_and_a_layout_out_of_tolerance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A config.json is enough for a twin; exit code 1 and the culprits where nothing may differ at all."""
    bare = bare_config(tmp_path / "bare", TINY["deepseek_v3"])
    code, out, err = run(
        capsys, "--model", bare, "--twin", "--layouts", "tp2", "--tolerance", "gradient=0,logprob=0", "--json"
    )
    assert code == 1, err
    facts: dict[str, Any] = json.loads(out)
    assert not facts["good"]
    assert "random weights" in facts["model"]
    assert facts["tolerances"]["gradient"] == 0
    (layout,) = facts["layouts"]
    assert (layout["name"], layout["ranks"], layout["sp"], layout["implied"]) == ("tp2", 2, True, ["sp"])
    assert any(line.startswith("gradient of model.") for line in layout["problems"])
    assert 0 < next(iter(layout["found"]["gradients"].values())) < 1e-4


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher itself is tested with layouts."""
    monkeypatch.setattr(launcher, "run_ranks", forked_ranks())


@pytest.mark.usefixtures("forked")
def test_a_table_of_engines(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0; the FSDP engine on one rank and on two, against one rank of Megatron-Core."""
    code, out, err = run(capsys, "--model", model, "--no-packing", verb="engines")
    assert code == 0, out + err
    for text in ("fsdp1", "fsdp2", "log-prob error", "worst weight after a step", "steps: 3", "packing: False"):
        assert text in out
    assert out.count("equal") == 2
    said = [line.split(" ", 1)[1] for line in err.splitlines() if line[0].isdigit()]
    assert said[1:] == [
        "1 rank: reference",
        "1 rank: fsdp1",
        "2 ranks: fsdp2",
    ]


@pytest.mark.usefixtures("forked")
def test_engines_of_a_twin_out_of_tolerance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A mixture's config.json; exit code 1 and the culprit where no gradient may differ at all."""
    bare = bare_config(tmp_path / "bare", TINY["qwen3_moe"])
    given = ("--model", bare, "--twin", "--nproc", "1", "--steps", "2", "--tolerance", "gradient=0", "--json")
    code, out, err = run(capsys, *given, verb="engines")
    assert code == 1, err
    facts: dict[str, Any] = json.loads(out)
    assert (facts["good"], facts["steps"], facts["tolerances"]["gradient"]) == (False, 2, 0)
    assert "twin of qwen3_moe" in facts["model"]
    (engine,) = facts["layouts"]
    assert (engine["name"], engine["engine"], engine["ranks"]) == ("fsdp1", "fsdp", 1)
    (problem,) = engine["problems"]
    assert problem.startswith("gradient of model.")
    errors = engine["found"]["gradients"]
    assert any(".mlp.experts." in name for name in errors)
    assert 0 < max(errors.values()) < 1e-4


MISTAKES: dict[str, tuple[list[str], str]] = {
    "unknown layout": (["--layouts", "tp2,zp3"], "'zp3' is not a layout"),
    "no experts": (["--layouts", "ep2"], "ep2 is not possible: ep=2: model_type=qwen3 has no experts"),
    "layers": (["--layouts", "pp8"], "does not divide num_hidden_layers=4"),
    "twin's layers": (["--layouts", "pp8", "--twin"], "needs 8 layers, num_hidden_layers=4"),
    "twin's heads": (["--layouts", "pp2,tp8", "--twin"], "tp8 is not possible"),
    "dtype": (["--dtype", "fp16"], "'--dtype': Value error, 'fp16' is not one of 'fp32', 'bf16'"),
    "tolerance": (["--tolerance", "grad=1"], "--tolerance=grad=1"),
    "nproc": (["--layouts", "tp2", "--nproc", "3"], "--nproc=3 is not a multiple"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 before any rank starts; those without layouts are mistakes of engines, too."""
    arguments, said = MISTAKES[mistake]
    for verb in ("layouts", "engines")[: 2 - ("--layouts" in arguments)]:
        code, out, err = run(capsys, "--model", model, *arguments, verb=verb)
        assert (code, out) == (2, "")
        assert said in err
        assert "rank" not in err.split(said)[0]


@pytest.mark.parametrize(("family", "twin", "count"), [("qwen3", False, 9), ("qwen3", True, 9), ("mixtral", True, 12)])
def test_without_layouts_the_usual_ones_that_the_model_can_have(
    family: str, twin: bool, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dense model has none with experts; before any rank starts."""
    asked: list[str] = []
    monkeypatch.setattr(
        verbs, "_verify", lambda model, hf, wanted, options, **_: asked.extend(layout.name for layout in wanted)
    )
    model = write_tiny_checkpoint(tmp_path / family, family=family)
    assert main(["verify", "layouts", "--model", str(model), *(["--twin"] if twin else [])]) == 0
    assert asked == [name for name in ALL.split(",") if count == 12 or "ep" not in name]
    assert len(asked) == count


def test_a_config_without_weights_needs_twin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "--model", bare_config(tmp_path / "bare", TINY["qwen3"]), "--layouts", "tp2")
    assert code == 2
    assert "add --twin" in err
    code, _, err = run(capsys, "--model", tmp_path / "nowhere", "--layouts", "tp2")
    assert code == 2
    assert "no such directory" in err


def test_ranks_that_hang_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the deadline, and what they started with them."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "hangs.py").write_text("import time; time.sleep(600)")
    began = time.monotonic()
    with pytest.raises(RanksFailed, match="did not end within 1 s"):
        run_ranks(["hangs"], ranks=2, logs=tmp_path, timeout_s=1.0, use_gpus=False)
    assert time.monotonic() - began < 20


def test_a_failing_rank_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says which rank failed and how; the one that waits for it is ended."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "fails.py").write_text(
        f"import os, pathlib, time\nif os.environ['RANK'] == '1':\n    raise ValueError('no luck')\n"
        f"pathlib.Path({str(tmp_path)!r}, 'pid').write_text(str(os.getpid()))\ntime.sleep(600)\n"
    )
    with pytest.raises(RunError, match="rank 1: ValueError: no luck"):
        run_ranks(["fails"], ranks=2, logs=tmp_path, timeout_s=60.0, use_gpus=False)
    if (tmp_path / "pid").exists():
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), 0)
