"""`mega-rl recipes`."""

from __future__ import annotations

import pytest

from mega_rl.cli import app as cli
from mega_rl.config import packaged


def test_list_gives_each_recipe_a_line_with_its_summary(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # no terminal: no line is wrapped
    for arguments in (["recipes"], ["recipes", "list"]):
        assert cli.main(arguments) == 0
        rows = [line.split(maxsplit=1) for line in capfd.readouterr().out.splitlines()]
        assert [name for name, _ in rows] == packaged.names()
        assert [text for _, text in rows] == [packaged.summary(packaged.file_of(name)) for name in packaged.names()]


def test_show_prints_the_file(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes", "show", "quickstart"]) == 0
    assert capfd.readouterr().out == packaged.file_of("quickstart").read_text()


def test_an_unknown_name_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes", "show", "quikstart"]) == 2
    names = ", ".join(packaged.names())
    line = f"no packaged recipe 'quikstart'; did you mean quickstart? packaged recipes: {names}"
    assert capfd.readouterr().err == f"error: {line}\n"
