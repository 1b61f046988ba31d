"""`mega-rl doctor`: the report, and `--require` with its exit codes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from mega_rl.cli import app as cli
from mega_rl.cli import doctor
from mega_rl.rollout.sglang.server.installation import Installation

NO_SUCH = "no_such_extension_of_torch"


def require(names: str, capfd: pytest.CaptureFixture[str]) -> tuple[int, list[str], str]:
    code = cli.main(["doctor", "--require", names])
    out, err = capfd.readouterr()
    return code, out.splitlines(), err


def test_what_is_there_is_one_line_and_no_report(capfd: pytest.CaptureFixture[str]) -> None:
    assert require("core, torch,megatron", capfd) == (0, ["all there: core, torch,megatron"], "")


def test_each_missing_name_is_a_line_in_the_given_order(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(doctor.REQUIREMENTS, "ray", lambda: "not installed")  # type: ignore[misc]
    monkeypatch.setitem(doctor.REQUIREMENTS, "cuda", lambda: "no device")  # type: ignore[misc]
    code, lines, err = require("ray,torch,cuda,ray", capfd)
    assert code == 1
    assert [line.split() for line in lines] == [
        ["ray", "MISSING:", "not", "installed"], ["cuda", "MISSING:", "no", "device"],
    ]  # fmt: skip
    assert err == ""


@pytest.mark.parametrize("names", ["cuda,tee", "", ","])
def test_an_unknown_name_or_none_is_a_mistake_before_anything_is_looked_for(
    names: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(doctor.REQUIREMENTS, "cuda", lambda: pytest.fail("looked"))  # type: ignore[misc]
    code, lines, err = require(names, capfd)
    assert (code, lines) == (2, [])
    assert err.count("\n") == 1
    assert "cuda, megatron, te, apex" in err
    assert ("tee: no such requirement" in err) == ("tee" in names)


def test_a_package_that_is_installed_and_does_not_load_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(doctor.REQUIREMENTS, "apex", lambda: doctor._does_not_load(NO_SUCH))  # type: ignore[misc]
    (absent,) = doctor.missing(["apex"])
    assert absent.endswith(f"MISSING: ModuleNotFoundError: No module named '{NO_SUCH}'")

    (tmp_path / f"{NO_SUCH}.py").write_text("raise ImportError('undefined symbol: _ZN3c10\\nin a library')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (broken,) = doctor.missing(["apex"])
    assert broken.endswith("MISSING: ImportError: undefined symbol: _ZN3c10 in a library")

    (tmp_path / f"{NO_SUCH}.py").write_text("")
    monkeypatch.delitem(sys.modules, NO_SUCH, raising=False)
    assert list(doctor.missing(["apex"])) == []
    monkeypatch.delitem(sys.modules, NO_SUCH)


@pytest.mark.parametrize(
    ("installation", "tools", "reason"),
    [
        (None, [], "not installed; "),
        (Installation("0.5.9", None), [], "0.5.9 is installed; mega_rl works with 0.5.21 and 0.5.20 only"),
        (Installation("0.5.21", None), ["no nvcc"], "no nvcc"),
        (Installation("0.5.21", None), [], ""),
        (Installation("0.5.21", Path("/v/sglang")), ["no nvcc"], ""),
    ],
)
def test_sglang_is_reported_and_required(
    installation: Installation | None, tools: list[str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "find_sglang", lambda: installation)
    monkeypatch.setattr(doctor, "missing_tools", lambda: tools)
    monkeypatch.setattr(doctor, "REQUIREMENTS", {"sglang": doctor._no_sglang})
    line = next(line for line in doctor.report() if re.match("sglang +(works|no:)", line))
    assert line.endswith("works") == (not reason)
    assert not reason or f"no: {reason}" in line
    lines = list(doctor.missing(["sglang"]))
    assert [f"MISSING: {reason}" in line for line in lines] == ([True] if reason else [])


@pytest.mark.parametrize(
    ("build", "reason"), [(None, "is a build without CUDA"), ("13.0", "no device is visible; a container gets them")]
)
def test_cuda_tells_a_build_from_a_machine(build: str | None, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", build)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (line,) = doctor.missing(["cuda"])
    assert reason in line
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert list(doctor.missing(["cuda"])) == []


def test_report_lists_everything(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    out = capfd.readouterr().out
    for word in ("python ", "torch ", "megatron-core", "cuda", "transformer-engine", "sglang", "wandb"):
        assert word in out
    assert re.search(r"^core +works$", out, flags=re.MULTILINE)
    assert "patches of Megatron-Core" in out.splitlines()[-1]
