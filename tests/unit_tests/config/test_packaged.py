"""A recipe is named by its file, or by its name if it comes with the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from mega_rl.config import packaged
from mega_rl.config.loader import load
from mega_rl.errors import UserError, UserErrors


def test_a_file_of_the_user_comes_before_a_packaged_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("quickstart.yaml").write_text("trainer:\n  steps: 7\n")
    assert load(Path("quickstart.yaml")).trainer.steps == 7
    assert load(Path("quickstart")).trainer.steps != 7


@pytest.mark.parametrize(
    ("asked", "guess"),
    [
        ("quikstart", "did you mean quickstart? "),
        ("recipes/quickstart.yaml", "did you mean quickstart? "),
        ("gsm8k_qwen3_0.6b", "did you mean gsm8k_qwen3_0.6b_1gpu? "),
        ("zzz.yaml", ""),
        ("../recipes/quickstart", "did you mean quickstart? "),
    ],
)
def test_an_unknown_recipe_gets_the_nearest_name_and_the_list(asked: str, guess: str) -> None:
    with pytest.raises(UserErrors) as caught:
        load(Path(asked))
    (line,) = caught.value.problems
    rule = f"recipe '{asked}' does not exist, as a file or as a packaged recipe; "
    assert line == f"{rule}{guess}packaged recipes: {', '.join(packaged.names())}"


def test_a_name_is_no_way_out_of_the_packages_folder() -> None:
    for name in ("../recipes/quickstart", str(packaged.FOLDER / "quickstart"), "", "."):
        with pytest.raises(UserError, match="no packaged recipe"):
            packaged.file_of(name)


def test_a_summary_is_the_first_sentence_of_the_head(tmp_path: Path) -> None:
    recipe = tmp_path / "one.yaml"
    for text, summary in {
        "# One line; no stop\n#   mega-rl train\nmodel: {}\n": "One line; no stop",
        "# Two, 0.6B,\n# lines. More.\nmodel: {}\n": "Two, 0.6B, lines.",
        "model: {}\n# not a head\n": "",
    }.items():
        recipe.write_text(text)
        assert packaged.summary(recipe) == summary
    summaries = [packaged.summary(packaged.file_of(name)) for name in packaged.names()]
    assert all(summaries)
    assert len(set(summaries)) == len(summaries)
