"""Pictures of a report in docs/images: `python -m tests.report_pictures RUN [RUN ...]`; needs Chromium."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mega_rl.report.document import page_of
from mega_rl.report.runs import read_runs
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


def main(runs: Sequence[str]) -> None:
    """Draw the top of the page, its phases, the difference of settings and tokens of samples."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
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


if __name__ == "__main__":
    main(sys.argv[1:])
