"""The table of `mega-rl verify` on a narrow terminal."""

from __future__ import annotations

import pytest

from mega_rl.cli.verify import print_verdicts
from mega_rl.verify.layouts import Layout, LayoutErrors
from mega_rl.verify.run import Verdict
from mega_rl.verify.tolerances import FP32

NAMES = ("model.layers.17.mlp.experts.113.down_proj.weight", "model.layers.0.self_attn.q_proj.weight")


@pytest.mark.parametrize("columns", [80, 200])
def test_names_of_tensors_are_whole(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # rich takes the output for a terminal
    monkeypatch.setenv("TERM", "dumb")
    gradient, weight = ({name: 1e-6} for name in NAMES)
    actual = LayoutErrors(1e-6, 3.0, 1e-7, 1e-7, gradient, weight, {}, 4)
    verdict = Verdict(Layout(name="tp2", tp=2), actual, ())
    print_verdicts([verdict], FP32)
    out = capsys.readouterr().out
    for name in NAMES:
        assert name.removeprefix("model.") in out
    assert max(map(len, out.splitlines()[:6])) <= columns
