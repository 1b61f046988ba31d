"""Releases that are allowed, and what a release outside of them says at start."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from mega_rl import environment
from mega_rl.cli import app as cli
from mega_rl.errors import UserErrors
from mega_rl.parallel import accelerator
from tests.fake_te.package import release as te_release
from tests.oldest import tested

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def install(monkeypatch: pytest.MonkeyPatch, **releases: str) -> None:
    """Make packages seem to be of other releases."""
    real = environment.version
    monkeypatch.setattr(environment, "version", lambda name: releases.get(name) or real(name))
    environment.require_versions.cache_clear()


def test_installed_metadata_and_docs_are_those_of_pyproject() -> None:
    declared = {one.name: one.specifier for one in map(Requirement, PROJECT["dependencies"])}
    declared.pop("megatron-core")  # has a table of its own
    assert {one.name: one.specifier for one in environment.requirements()[:-1]} == declared
    assert {name: SpecifierSet(allowed) for name, allowed, _, _ in tested()} == declared
    for name, _, oldest, newest in tested():
        assert {oldest, newest} == set(declared[name].filter([oldest, newest]))


def test_extra_for_gpus_takes_the_checked_transformer_engine() -> None:
    required, megatron = map(Requirement, PROJECT["optional-dependencies"]["gpu"])
    engine = environment.TRANSFORMER_ENGINE
    assert required.extras == {"core_cu13", "pytorch"}, "the kernels for torch's CUDA are in an extra of their own"
    assert (megatron.name, megatron.specifier) == ("megatron-core", SpecifierSet("==0.16.*")), "compared with it"
    assert (required.name, required.specifier) == (engine.name, engine.specifier)
    assert "2.11 exactly" in (ROOT / "docs/versions.md").read_text()
    assert environment.is_allowed(engine, te_release())


@pytest.mark.parametrize("release", ["2.10.0", "2.12.0", "2.11.0", "2.11.0+c188b533"])
def test_another_transformer_engine_is_one_line(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, **{"transformer-engine": release})
    said = f"transformer-engine {release} is installed, which mega_rl does not run on; run 'pip install "
    lines = [f'{said}"transformer-engine==2.11.*"\'']
    assert list(environment.version_problems()) == ([] if release.startswith("2.11") else lines)


def test_builds_of_containers_count_as_their_release() -> None:
    (torch,) = (one for one in environment.requirements() if one.name == "torch")
    allowed = ("2.14.0a0+git1234.nv26.10", "2.13.0+cpu", "2.12.1+cu130", "3.0.0a0")
    assert [environment.is_allowed(torch, release) for release in allowed] == [True, True, False, False]


@pytest.mark.parametrize("command", [["train", "model.path=m"], ["quickstart"]], ids=" ".join)
def test_release_that_is_not_allowed_is_one_line(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    install(monkeypatch, transformers="4.57.6")
    assert cli.main(command) == 2
    line = "error: transformers 4.57.6 is installed, which mega_rl does not run on; run 'pip install \"transformers"
    assert line in capsys.readouterr().err
    assert cli.main(["doctor"]) == 0
    assert "core                 no: transformers 4.57.6 is installed" in capsys.readouterr().out


def test_release_that_is_not_allowed_prepares_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, torch="2.12.1", tensordict="0.14.3")
    with pytest.raises(UserErrors) as error:
        accelerator.prepare()
    assert [line.split(" is installed")[0] for line in error.value.problems] == ["torch 2.12.1", "tensordict 0.14.3"]
