"""Pictures of docs/report.md in docs/images; needs Chromium.

`python -m tests.report_pictures RUN [RUN ...]` draws a report, with `--entropy` tokens by entropy.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mega_rl.tracking.report.content import page_of, read_runs
from tests.helpers.browser import chromium

FOLDER = Path(__file__).parents[1] / "docs" / "images"
WIDTH = 1280
# Samples with values of tokens alone, of the last run that has some.
ONLY_TOKENS = """(() => {
    document.querySelectorAll("#samples details").forEach((box) => {
        box.open = true;
        box.dispatchEvent(new Event("toggle"));
    });
    document.querySelectorAll(".sample:not(.heat)").forEach((box) => box.remove());
    document.querySelectorAll("#samples details").forEach((box) => box.querySelector(".heat") || box.remove());
})()"""
BY_ENTROPY = """(() => {
    document.querySelectorAll("#samples details").forEach((box) => {
        box.open = true;
        box.dispatchEvent(new Event("toggle"));
    });
    document.querySelectorAll("#samples select").forEach((choose) => {
        choose.value = "entropy";
        choose.dispatchEvent(new Event("change"));
    });
})()"""


def main(runs: Sequence[str]) -> None:
    """Draw the top of the page, its phases, the difference of settings and tokens of samples."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        page = Path(folder) / "report.html"
        page.write_text(page_of(read_runs([Path(run) for run in runs])), encoding="utf-8")
        with chromium(Path(folder) / "light", width=WIDTH, height=1100) as browser:
            browser.open(page.as_uri())
            browser.screenshot(FOLDER / "report.png", selector="main", height=1180)
            browser.screenshot(FOLDER / "report_settings.png", selector="#settings", height=420)
            browser.evaluate(ONLY_TOKENS)
            browser.screenshot(FOLDER / "report_tokens.png", selector="#samples", height=640)
        with chromium(Path(folder) / "dark", width=WIDTH, height=1100, scheme="dark") as browser:
            browser.open(page.as_uri())
            browser.screenshot(FOLDER / "report_phases.png", selector="#phases", height=560)


def tokens(runs: Sequence[str]) -> None:
    """Draw tokens of samples by their entropy, of runs whose records have it."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        page = Path(folder) / "report.html"
        page.write_text(page_of(read_runs([Path(run) for run in runs])), encoding="utf-8")
        with chromium(Path(folder) / "profile", width=WIDTH, height=1100) as browser:
            browser.open(page.as_uri())
            browser.evaluate(BY_ENTROPY)
            browser.evaluate(ONLY_TOKENS)
            browser.screenshot(FOLDER / "report_entropy.png", selector="#samples", height=520)


if __name__ == "__main__":
    main(sys.argv[1:]) if sys.argv[1] != "--entropy" else tokens(sys.argv[2:])
