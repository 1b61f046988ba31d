"""The page of a report in a real Chromium: drawn, quiet, asking nothing of the network, deaf to hostile samples."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mega_rl.tracking.report.content import page_of, read_runs
from tests.helpers.browser import Browser, chromium
from tests.unit_tests.tracking.report.planted import HEALTHY, HOSTILE, dump, plant, record

OPEN_ALL = """document.querySelectorAll("details").forEach((box) => {
    box.open = true;
    box.dispatchEvent(new Event("toggle"));
})"""
METRICS = "[...document.querySelectorAll('.chart[data-metric]')]"
REWARD = "document.querySelector('[data-metric=\"reward/mean\"]')"


def enter(browser: Browser, selector: str, value: str, event: str) -> None:
    """Give a control a value, as a person would."""
    browser.evaluate(f"""(() => {{
        const control = document.querySelector({selector!r});
        control.value = {value!r};
        control.dispatchEvent(new Event({event!r}));
    }})()""")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of a run and one of other settings, with hostile names, settings, metrics and samples."""
    folder = tmp_path_factory.mktemp("report")
    curves = {**HEALTHY, "values/explained_variance": lambda step: -2.0, f"own/{HOSTILE[:20]}": float}
    runs = [
        plant(folder / f"s{seed}", curves={**curves, "reward/mean": lambda step, seed=seed: step / 50 + seed / 10},
              settings={"trainer": {"seed": seed, "run_dir": str(folder / f"s{seed}")}, "model": {"path": HOSTILE}})
        for seed in (0, 1)
    ]  # fmt: skip
    runs.append(plant(folder / "<img src=x>", steps=40, settings={"optim": {"lr": 2e-6}}))
    dump(runs[0])
    record(runs[0])
    file = folder / "report.html"
    file.write_text(page_of(read_runs(runs)), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def browser(page: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        opened.open(page.as_uri())
        opened.evaluate(OPEN_ALL)
        yield opened


def test_every_chart_has_paths(browser: Browser) -> None:
    with_paths = f"{METRICS}.filter((box) => box.querySelector('svg path[d^=M]')).map((box) => box.dataset.metric)"
    assert set(browser.evaluate(with_paths)) == {*HEALTHY, f"own/{HOSTILE[:20]}"}
    assert browser.evaluate(f"{METRICS}.every((box) => box.querySelector('svg path[d^=M]'))")
    assert "NaN" not in browser.evaluate(
        "[...document.querySelectorAll('path')].map((p) => p.getAttribute('d')).join()"
    )


def test_seeds_make_a_band_and_other_settings_a_line(browser: Browser) -> None:
    assert browser.evaluate(f"{REWARD}.querySelectorAll('.band').length") == 1
    assert browser.evaluate(f"{REWARD}.querySelectorAll('.curve').length") == 2


def test_the_page_says_what_it_is_of(browser: Browser) -> None:
    assert browser.evaluate("document.title") == "mega_rl: s0, s1, <img src=x>"
    assert browser.evaluate("document.querySelector('h1').textContent") == "3 runs"
    text = browser.evaluate("document.body.innerText")
    assert "The critic is worse than a constant" in text
    assert "nats per token" in text
    assert "optim.lr" in browser.evaluate("document.querySelector('#difference').innerText")


def test_phases_stand_on_one_another(browser: Browser) -> None:
    assert browser.evaluate("document.querySelectorAll('[data-phases]').length") == 3
    assert browser.evaluate("document.querySelector('[data-phases] .legend').innerText").count("%") == 3
    assert browser.evaluate("document.querySelectorAll('[data-phases=\"0\"] path').length") == 3


def test_hostile_texts_stay_texts(browser: Browser) -> None:
    assert browser.evaluate("document.querySelectorAll('img, iframe, main script, main b b').length") == 0
    assert HOSTILE in browser.evaluate("[...document.querySelectorAll('.response')].map((p) => p.textContent).join()")
    assert HOSTILE in browser.evaluate("[...document.querySelectorAll('.token')].map((t) => t.textContent).join('\\n')")


def test_tokens_are_coloured_by_the_value_that_is_chosen(browser: Browser) -> None:
    assert browser.evaluate("document.querySelectorAll('.heat').length") == 2
    before = browser.evaluate("document.querySelector('.heat .tokens').innerHTML")
    enter(browser, ".samples select", "log-prob difference", "change")
    assert browser.evaluate("document.querySelector('.heat .tokens').innerHTML") != before
    colour = "getComputedStyle(document.querySelector('.scale .warm-10')).backgroundColor"
    assert browser.evaluate(colour).startswith("rgb")
    assert "advantage" in browser.evaluate("document.querySelector('.heat .token:not(.given)').title")
    enter(browser, ".samples select", "", "change")
    assert browser.evaluate("document.querySelector('.sample .response').textContent") == "2"


def test_the_cursor_names_step_and_value(browser: Browser) -> None:
    browser.evaluate(
        f"{REWARD}.querySelector('svg').dispatchEvent(new KeyboardEvent('keydown', {{key: 'ArrowRight'}}))"
    )
    bubble = browser.evaluate(f"{REWARD}.querySelector('.bubble.shown').innerText")
    assert "step 1" in bubble
    assert "0.07 (0.02 to 0.12)" in bubble  # two seeds, 1 / 50 and 1 / 50 + 1 / 10


def test_nothing_is_wider_than_the_window(browser: Browser) -> None:
    assert browser.evaluate("document.documentElement.scrollWidth") <= 1280


def test_no_error_on_the_console_and_no_request_but_the_file(browser: Browser, page: Path) -> None:
    """The last test of this file: of all that the others did."""
    assert browser.console == []
    assert browser.requests == [page.as_uri()]


def test_what_a_conversation_read_is_folded(tmp_path: Path) -> None:
    """By values of tokens and as plain text; hostile answers of tools stay texts, also unfolded."""
    run = plant(tmp_path / "a", curves={**HEALTHY, "agent/turns_mean": float, "agent/end_done_fraction": float})
    talk = [[1, "look it up"], [0, f"\n<tool>{HOSTILE}</details><|im_end|>"], [2, "so it is 2<|im_end|>"]]
    record(run, turns=[0, 0, 1, 1, 0, 0, 0, 2, 2, 2, 2, 2])
    dump(run, conversation=talk, end="turns")
    (tmp_path / "report.html").write_text(page_of(read_runs([run])), encoding="utf-8")
    with chromium(tmp_path / "profile") as opened:
        opened.open((tmp_path / "report.html").as_uri())

        def texts(selector: str) -> list[str]:
            return list(opened.evaluate(f"[...document.querySelectorAll('{selector}')].map((e) => e.textContent)"))

        assert texts(".heat .label")[:2] == ["turn 1, trained in another row", "turn 2"]
        assert texts(".heat .read summary")[0].startswith("read: <script>alert(1)")
        assert texts(".heat .read .token") == []
        assert len(texts(".heat")) == 2
        assert texts(".sample:not(.heat) .turn") == ["turn 1look it up", "turn 2so it is 2<|im_end|>"]
        assert "end turns" in texts(".sample:not(.heat) .number")
        assert {"agent/turns_mean", "agent/end_done_fraction"} <= {*texts(".charts .name")}
        opened.evaluate(OPEN_ALL)
        assert len(texts(".heat .read .token")) == 6
        assert texts(".sample:not(.heat) .read div") == [talk[1][1]]
        assert opened.evaluate("document.querySelectorAll('img, iframe, main script, main b b').length") == 0
        assert opened.console == []


def test_a_page_of_one_run_begins_with_what_it_came_to(tmp_path: Path) -> None:
    """One run of two validations, with a share that is always 0, and no explanation cut off."""
    curves = {**HEALTHY, "rollout/truncated_fraction": lambda step: 0.0, "reward/mean": lambda step: step / 4}
    settings = {"model": {"path": "/models/tiny"}, "engine": {"backend": "fsdp"}, "algorithm": {"advantage": "grpo"}}
    run = plant(tmp_path / "a", steps=8, curves=curves, settings=settings)
    record(run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "val/reward_mean": 1.25}\n{"step": 10, "val/reward_mean": 1.5}\n')
    (tmp_path / "report.html").write_text(page_of(read_runs([run])), encoding="utf-8")
    with chromium(tmp_path / "profile") as opened:
        opened.open((tmp_path / "report.html").as_uri())
        line = opened.evaluate("document.querySelector('.headline').textContent")
        share = (
            "[...document.querySelector('[data-metric=\"rollout/truncated_fraction\"]').querySelectorAll('svg text')]"
        )
        labels = opened.evaluate(f"{share}.map((text) => text.textContent)")
        cut = (
            "[...document.querySelectorAll('.meaning')].filter((box) => box.scrollHeight > box.clientHeight + 1).length"
        )
        assert opened.evaluate(cut) == 0
        dots = "document.querySelectorAll('[data-metric=\"val/reward_mean\"] circle').length"
        assert opened.evaluate(dots) == 2
        assert "fsdp" in opened.evaluate("document.querySelector('#changed').innerText")
    words = line.split(" \u00b7 ")
    assert words[:3] == ["tiny", "grpo", "fsdp"]
    assert words[-3:] == ["28 s in steps", "reward 0.25 \u2192 2", "validation 1.25 \u2192 1.5 (best)"]
    assert not [label for label in labels if label.startswith("-")]
    assert "0" in labels
