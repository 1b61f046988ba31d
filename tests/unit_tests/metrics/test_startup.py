"""The table of a run's models, before its first step."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from mega_rl.metrics.startup import RoleFacts, short_count, show_startup

ACTOR = RoleFacts(
    role="actor",
    model="/models/a[bold]b",
    family="qwen2",
    parameters=494_032_768,
    engine="megatron",
    layout="tp2 dp2",
    attention="te: flash",
    dtype="bf16",
    trains=True,
)
CRITIC = RoleFacts("critic", "/models/larger", "qwen2", 7_615_616_512, "megatron", "tp2 dp2", "sdpa", "bf16", True)
REWARD = RoleFacts("reward", "exact_match")


def shown(*roles: RoleFacts, terminal: bool, width: int = 80, stop_tokens: str = "") -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=width, color_system=None)
    show_startup(roles, stop_tokens=stop_tokens, console=console)
    return stream.getvalue()


def test_away_from_a_terminal_every_role_is_one_plain_line() -> None:
    """However narrow the log seems; brackets in paths are no markup."""
    assert shown(ACTOR, CRITIC, REWARD, terminal=False, width=20) == (
        "role    model             family  parameters  engine    layout   attention  dtype  trains\n"
        "actor   /models/a[bold]b  qwen2         494M  megatron  tp2 dp2  te: flash  bf16   yes\n"
        "critic  /models/larger    qwen2        7.62B  megatron  tp2 dp2  sdpa       bf16   yes\n"
        "reward  exact_match       -                -  -         -        -          -      no\n"
    )


def test_on_a_terminal_there_is_a_frame() -> None:
    wide = shown(ACTOR, CRITIC, REWARD, terminal=True, width=120)
    assert wide.count("\n") == 7
    for text in ("/models/a[bold]b", "te: flash", "7.62B", "exact_match", "│ reward │"):
        assert text in wide


def test_a_narrow_terminal_folds_no_word_and_says_once_what_all_models_share() -> None:
    assert shown(ACTOR, CRITIC, REWARD, terminal=True, width=80) == (
        "role    parameters  attention\n"
        "actor         494M  te: flash\n"
        "  /models/a[bold]b\n"
        "critic       7.62B  sdpa\n"
        "  /models/larger\n"
        "reward           -  -\n"
        "  exact_match\n"
        "all models: family qwen2, engine megatron, layout tp2 dp2, dtype bf16, trains yes\n"
    )


@pytest.mark.parametrize(("terminal", "width"), [(False, 80), (True, 80), (True, 120)], ids=["log", "narrow", "wide"])
def test_the_tokens_that_end_a_response_are_the_last_line(terminal: bool, width: int) -> None:
    """Brackets in a token are no markup."""
    text = shown(ACTOR, CRITIC, terminal=terminal, width=width, stop_tokens="<eos> (id 1) or [/b] (id 2)")
    assert text.endswith("\nresponses end at <eos> (id 1) or [/b] (id 2)\n")


def test_a_column_without_a_word_is_left_out() -> None:
    assert shown(REWARD, terminal=False) == "role    model        trains\nreward  exact_match  no\n"


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.00K"),
        (9_994, "9.99K"),
        (9_996, "10.0K"),
        (99_960, "100K"),
        (494_032_768, "494M"),
        (999_600_000, "1.00B"),
        (7_615_616_512, "7.62B"),
        (70_553_706_496, "70.6B"),
        (1_026_000_000_000, "1.03T"),
        (12_345_678_000_000_000, "12346T"),
    ],
)
def test_counts_have_three_digits(number: int, text: str) -> None:
    assert short_count(number) == text
