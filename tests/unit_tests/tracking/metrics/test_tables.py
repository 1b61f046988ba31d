"""The table of a run's models before its first step, and the table at its end."""

from __future__ import annotations

import io
from pathlib import Path
from unittest.mock import patch

import pytest
from rich.console import Console

from mega_rl.tracking.metrics import tables
from mega_rl.tracking.metrics.sinks import JsonlSink
from mega_rl.tracking.metrics.tables import RoleFacts, show_startup, show_summary

ACTOR = RoleFacts(
    role="actor", model="/models/a[bold]b", family="qwen2", parameters=494_032_768, engine="megatron",
    layout="tp2 dp2", attention="te: flash", dtype="bf16", trains=True,
)  # fmt: skip
CRITIC = RoleFacts("critic", "qwen2", 7_615_616_512, "megatron", "tp2 dp2", "sdpa", "bf16", True, "/models/larger")
REWARD = RoleFacts("reward", model="exact_match")


def console() -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, width=20, color_system=None), stream


def shown(*roles: RoleFacts, stop_tokens: str = "") -> str:
    made, stream = console()
    with patch.object(tables, "standard_error", return_value=made):
        show_startup(roles, stop_tokens=stop_tokens)
    return stream.getvalue()


def summary(run: Path) -> str:
    made, stream = console()
    with patch.object(tables, "standard_error", return_value=made):
        show_summary(run)
    return stream.getvalue()


def test_every_role_is_one_line() -> None:
    """However narrow the terminal is; brackets are no markup; columns without a word are left out."""
    assert shown(ACTOR, CRITIC, REWARD, stop_tokens="<eos> (id 1) or [/b] (id 2)") == (
        "role    family  parameters  engine    layout   attention  dtype  trains  model\n"
        "actor   qwen2         494M  megatron  tp2 dp2  te: flash  bf16   yes     /models/a[bold]b\n"
        "critic  qwen2        7.62B  megatron  tp2 dp2  sdpa       bf16   yes     /models/larger\n"
        "reward  -                -  -         -        -          -      no      exact_match\n"
        "responses end at <eos> (id 1) or [/b] (id 2)\n"
    )
    assert shown(REWARD) == "role    trains  model\nreward  no      exact_match\n"


def test_run_is_summed_up_from_its_files(tmp_path: Path) -> None:
    run = tmp_path / "run[1]"
    for name in ("hf/step_000002", "checkpoints/step_000001", "checkpoints/step_000002"):
        (run / name).mkdir(parents=True)
    sink = JsonlSink(run / "metrics.jsonl", resume_step=1)
    sink.log(0, {"val/reward_mean": 0.25})
    for step in (1, 2):
        sink.log(step, {"reward/mean": step / 4, "time/step_s": 40.0} | ({"val/reward_mean": 0.5} if step == 2 else {}))
    assert summary(run).splitlines() == [
        "steps               2",
        "time in steps       1:20",
        "reward              0.2500 -> 0.5000  ▁█",
        "validation reward   0: 0.2500  2: 0.5000",
        f"metrics             {run}/metrics.jsonl",
        f"checkpoint          {run}/checkpoints/step_000002",
        f"Hugging Face model  {run}/hf/step_000002",
        f"export              mega-rl checkpoint export {run} FOLDER",
        f"page                mega-rl report {run}",
    ]


@pytest.mark.parametrize("content", [b"\xb8\xff\x00\n", b"oops\n{}\n"], ids=["bytes", "text"])
def test_damaged_metrics_do_not_fail_a_run(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(content)
    (tmp_path / "checkpoints" / "step_000002").mkdir(parents=True)
    text = summary(tmp_path)
    assert "metrics.jsonl: cannot be read" in text
    assert "step_000002" in text
