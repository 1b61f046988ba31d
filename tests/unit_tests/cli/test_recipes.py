"""`mega-rl recipes`."""

from __future__ import annotations

from pathlib import Path

import pytest

from mega_rl.cli import app as cli
from mega_rl.config import packaged
from mega_rl.config.loader import load


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_list_gives_each_recipe_a_line_with_its_summary(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # no terminal: no line is wrapped
    for arguments in (["recipes"], ["recipes", "list"]):
        assert cli.main(arguments) == 0
        rows = [line.split(maxsplit=1) for line in capfd.readouterr().out.splitlines()]
        assert [name for name, _ in rows] == packaged.names()
        assert [text for _, text in rows] == [packaged.summary(packaged.file_of(name)) for name in packaged.names()]


def test_list_fits_a_narrow_terminal(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["recipes"]) == 0
    assert max(map(len, capfd.readouterr().out.splitlines())) <= 80


def test_show_prints_the_file(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes", "show", "quickstart"]) == 0
    assert capfd.readouterr().out == packaged.file_of("quickstart").read_text()


@pytest.mark.parametrize("verb", ["show", "copy"])
def test_an_unknown_name_is_one_line(verb: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes", verb, "quikstart"]) == 2
    names = ", ".join(packaged.names())
    line = f"no packaged recipe 'quikstart'; did you mean quickstart? packaged recipes: {names}"
    assert capfd.readouterr().err == f"error: {line}\n"
    assert list(Path().iterdir()) == []


def test_copy_writes_a_recipe_that_trains_the_same(folder: Path) -> None:
    (folder / "sub").mkdir()
    for arguments, file in (
        ([], "quickstart.yaml"),
        (["mine.yaml"], "mine.yaml"),
        (["sub"], "sub/quickstart.yaml"),
    ):
        assert cli.main(["recipes", "copy", "quickstart", *arguments]) == 0
        assert load(folder / file) == load(packaged.file_of("quickstart"))


def test_copy_replaces_nothing_unless_it_is_asked_to(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    mine = folder / "quickstart.yaml"
    mine.write_text("trainer: {}\n")
    assert cli.main(["recipes", "copy", "quickstart"]) == 2
    assert capfd.readouterr().err == "error: quickstart.yaml: exists; name another file, or replace it with --force\n"
    assert mine.read_text() == "trainer: {}\n"
    assert cli.main(["recipes", "copy", "quickstart", "--force"]) == 0
    assert mine.read_text() == packaged.file_of("quickstart").read_text()


def test_copy_into_a_folder_that_is_missing_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes", "copy", "quickstart", "gone/mine.yaml"]) == 2
    line = "'gone/mine.yaml' cannot be written: No such file or directory; name another file"
    assert capfd.readouterr().err == f"error: {line}\n"
