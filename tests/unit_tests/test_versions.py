"""The table of releases, and what a release outside of it says at start."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from mega_rl import versions
from mega_rl.cli import app as cli
from mega_rl.errors import UserErrors
from mega_rl.parallel import accelerator

ROOT = Path(__file__).parents[2]


def install(monkeypatch: pytest.MonkeyPatch, **releases: str) -> None:
    """Make packages seem to be of other releases."""
    real = versions.version
    monkeypatch.setattr(versions, "version", lambda name: releases.get(name) or real(name))
    versions.require.cache_clear()


def test_the_table_is_that_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {canonicalize_name(r.name): r.specifier for r in map(Requirement, project["dependencies"])}
    declared.pop("megatron-core")  # has a table of its own
    assert declared == {canonicalize_name(p.name): SpecifierSet(p.allowed) for p in versions.PACKAGES}


def test_the_extra_for_gpus_takes_the_release_of_transformer_engine_that_is_checked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required, megatron = map(Requirement, project["optional-dependencies"]["gpu"])
    engine = versions.TRANSFORMER_ENGINE
    assert required.extras == {"core_cu13", "pytorch"}, "the kernels for torch's CUDA are in an extra of their own"
    assert (megatron.name, megatron.specifier) == ("megatron-core", SpecifierSet("==0.16.*")), "compared with it"
    assert (required.name, required.specifier) == (engine.name, SpecifierSet(engine.allowed))
    assert f"{engine.allowed.removeprefix('==').removesuffix('.*')} exactly" in (ROOT / "docs/versions.md").read_text()


@pytest.mark.parametrize("release", ["2.10.0", "2.12.0", "2.20.2"])
def test_another_release_of_transformer_engine_is_one_line_at_start(
    release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, **{"transformer-engine": release})
    assert list(versions.problems()) == [
        f"transformer-engine {release} is installed, which Megatron-Core would import and has not been compared with; "
        "run 'pip install --no-build-isolation \"transformer-engine[core_cu13,pytorch]==2.11.*\"', or 'pip uninstall "
        "transformer-engine' to run Megatron-Core's own layers"
    ]


@pytest.mark.parametrize("release", ["2.11.0", "2.11.0+c188b533"])
def test_builds_of_the_checked_transformer_engine_run(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, **{"transformer-engine": release})
    assert not list(versions.problems())


def test_the_table_is_that_of_the_docs() -> None:
    text = (ROOT / "docs/versions.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w-]+) \| `([^`]+)` \| (\S+) \| (\S+) \|", text, flags=re.MULTILINE)
    assert rows == [(p.name, p.allowed, p.oldest, p.newest) for p in versions.PACKAGES]


def test_builds_of_containers_count_as_the_release_that_they_become() -> None:
    (torch,) = (package for package in versions.PACKAGES if package.name == "torch")
    assert versions.is_allowed(torch, "2.14.0a0+git1234.nv26.10")
    assert versions.is_allowed(torch, "2.13.0+cpu")
    assert not versions.is_allowed(torch, "2.12.1+cu130")
    assert not versions.is_allowed(torch, "3.0.0a0")


@pytest.mark.parametrize("command", [["train", "model.path=m"], ["quickstart"]], ids=" ".join)
def test_a_release_that_is_not_allowed_is_one_line_at_start(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    install(monkeypatch, transformers="4.57.6")
    assert cli.main(command) == 2
    line = (
        "error: transformers 4.57.6 is installed, which mega_rl does not run on; "
        "run 'pip install \"transformers>=5.12,<6\"'"
    )
    assert line in capsys.readouterr().err.splitlines()


def test_a_release_that_is_not_allowed_prepares_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, torch="2.12.1", tensordict="0.14.3")
    with pytest.raises(UserErrors) as error:
        accelerator.prepare()
    assert [line.split(" is installed")[0] for line in error.value.problems] == ["torch 2.12.1", "tensordict 0.14.3"]


@pytest.mark.parametrize(
    ("release", "remark"),
    [
        ("5.12.1", ""),
        ("5.99.0", "not tested: 5.12.0 to 5.23.0 are"),
        ("6.0.0", "NOT SUPPORTED: needs transformers>=5.12,<6"),
    ],
)
def test_doctor_says_which_releases_are_not_tested(
    release: str, remark: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, transformers=release)
    assert cli.main(["doctor"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("transformers "))
    assert line == f"{'transformers':<20} {release}{f'; {remark}' if remark else ''}"
