"""Pictures of docs/report.md in docs/images; needs Chromium.

`python -m tests.report_pictures RUN [RUN ...]` draws a report, `python -m tests.report_pictures --live RUN` the viewer
of a run that goes on, `python -m tests.report_pictures --entropy RUN` tokens by entropy.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from mega_rl.tracking.report.content import page_of, read_runs
from mega_rl.tracking.report.server import ViewServer
from tests.helpers.browser import chromium

FOLDER = Path(__file__).parents[1] / "docs" / "images"
WIDTH = 1280
SHORT_PATHS = "document.querySelector('#ranks pre').textContent.replace(/ \\/\\S*\\/(mega_rl\\/)/g, ' $1')"
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


def live(runs: Sequence[str]) -> None:
    """Draw the top of the viewer's page, once it has looked for news."""
    FOLDER.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        ViewServer([Path(run) for run in runs], refresh_s=1) as server,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with chromium(Path(folder) / "profile", width=WIDTH, height=1100) as browser:
            browser.open(server.address)
            browser.evaluate("new Promise((done) => setTimeout(done, 2500))")
            browser.evaluate(f"document.querySelector('#ranks pre').textContent = {SHORT_PATHS}")
            browser.screenshot(FOLDER / "view.png", selector="main", height=860)
        server.shutdown()


if __name__ == "__main__":
    drawn = {"--live": live, "--entropy": tokens}.get(sys.argv[1])
    main(sys.argv[1:]) if drawn is None else drawn(sys.argv[2:])
