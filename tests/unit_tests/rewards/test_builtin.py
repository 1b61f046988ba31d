"""Built-in reward functions, and finding a user's."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from mega_rl.rewards.builtin import final_answer, has_final_answer, math_verify, number_match, resolve

GSM8K = "She sells 16 - 3 = <<16-3=13>>13 eggs.\nShe earns 13 * 100 = $<<13*100=1300>>1300.\n#### 1,300"


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("16-3=13, 13*100=1300\n#### 1300", GSM8K, 1.0),
        ("#### $1,300.00", GSM8K, 1.0),
        (r"so she earns \boxed{\$1{,}300}", GSM8K, 1.0),
        (r"so she earns \boxed{1300\text{ dollars}}", GSM8K, 1.0),
        ("She earns 1,300 dollars.", GSM8K, 1.0),
        ("She earns 1300 for 13 eggs.", GSM8K, 0.0),  # the last number counts
        ("#### 13", GSM8K, 0.0),
        ("", GSM8K, 0.0),
        ("####", GSM8K, 0.0),
        ("#### -3", "3", 0.0),
        ("#### .50", "0.5", 1.0),
        ("7" * 100_000, "7", 0.0),
        ("7", "none", 0.0),
    ],
)
def test_number_match(response: str, answer: str, expected: float) -> None:
    assert number_match(response, answer) == expected


# Spellings of a number; under "" those of no number. A final answer is one of them as a whole.
SPELLINGS = {
    "5": r"5|5.0|05|+5|5.|$5|5$|$5$|5%|5 %|$5.00|**5**|\(5\)|\$5|5\%|5\,\text{cm}|\mathbf{5}|5 apples|"
    "5 dollars per hour|5 cm|\uff15|5\u00b0|\u20ac5|5\u20ac",
    "-5": r"-5|-$5|$-5|- 5|- $5|-\$5|$-5$|-5.0|-5%|" + "\u22125|\u20125|\u20135|\ufe635|\uff0d5",
    "1234": r"1,234|1{,}234|1,\!234|1,234.|$1,234.00|1,234 dollars",
    "": r"1/2|5-6|1e3|1.2e3|5^2|5!|5x|5k|5M|5i|0x5|1_000|1,23,456|12,34|5,0|1.234,5|1.2.3|0.333...|(5)|--5|~5|>5|5:30|"
    r"5+0|5*1|5\pi|\frac{5}{1}|x=5|nan|5,6|five|5th|1 000|5 or 6|5 and a half|5 million|5 dozen|5 1/2|"
    r"5 thousand dollars|5 \times 3|5 5|5\text{ million}",
}


@pytest.mark.parametrize("number", SPELLINGS)
def test_final_answer_is_a_whole_number_or_none(number: str) -> None:
    for spelling in SPELLINGS[number].split("|"):
        for response in (f"#### {spelling}", rf"so \boxed{{{spelling}}}"):
            scores = {gold: number_match(response, gold) for gold in ("5", "-5", "1", "6", "1234", "1000")}
            assert scores == {gold: float(gold == number) for gold in scores}, response


@pytest.mark.parametrize(
    ("response", "number"),
    [
        *((f"It is {spelling}.", "5") for spelling in ("5", "x=5", "2+3=5", "2 + 3 = 5", "(5)", '"5"', "**5**", "$5$")),
        *((f"It is {end}.", "") for end in ("8/5", "5x", "5!", "10:5")),
        *((f"It is {end}", "-5") for end in ("-5", "\u22125.", "-$5", r"\(-5\)", "x = -5")),
        (r"\frac{1}{5}", ""), ("v5", ""), ("none", ""),
    ],
)  # fmt: skip
def test_last_number_of_a_text_is_a_word(response: str, number: str) -> None:
    assert [gold for gold in ("5", "-5", "1", "0.5") if number_match(response, gold)] == [number] * bool(number)


@pytest.mark.parametrize("answer", ["1e+16", "#### 1e16", "10,000,000,000,000,000"])
def test_reference_may_have_an_exponent(answer: str) -> None:
    assert number_match("#### 10000000000000000", answer) == 1.0
    assert number_match("#### 16", answer) == number_match("#### 1e16", answer) == 0.0


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (GSM8K, 1.0),
        ("#### -$5", 1.0),
        ("#### 3,4", 0.0),
        ("2+2\n#### 4\n", 1.0),
        ("#### $4.50", 1.0),
        (r"so \boxed{\frac{1}{2}}.", 1.0),
        ("#### 4 or 5", 0.0),
        ("#### 4\nso it is", 0.0),
        (r"\boxed{4} \boxed{5}", 0.0),
        (r"\boxed{}", 0.0),
        ("The answer is 4.", 0.0),
    ],
)
def test_has_final_answer(response: str, expected: float) -> None:
    assert has_final_answer(response) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{3}, no, \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed {7}", "7"),
        (r"\boxed{4} and \boxed{5", "4"),  # cut off in the middle of a box
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        ("2 + 3\n#### 5", "5"),
        ("#### 5\nor\n#### 6 \nand more", "6"),
        (r"#### 5 \boxed{6}", "6"),
        (r"\boxed{6} #### 5", "5"),
        (r"\boxed{}", ""),
        ("####", ""),
        ("five", None),
    ],
)
def test_final_answer(text: str, expected: str | None) -> None:
    assert final_answer(text) == expected


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        (r"thus \boxed{72}", "72", 1.0),
        (r"\boxed{4} wait, \boxed{3}", "4", 0.0),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"\boxed{1,000}", "She earns 5 * 200 = 1000.\n#### 1000", 1.0),
        ("5 * 200\n#### 1000", "#### 1,000", 1.0),
        ("the answer is 72", "72", 1.0),
        (r"\boxed{(1, 2)}", "(1,2)", 1.0),
        (r"\boxed{x + 1}", "1 + x", 1.0),
        *(
            (rf"\boxed{{{text}}}", gold, 0.0)
            for text, gold in (("cat", "act"), ("no", "on"), ("x y", "yx"), ("A'", "A"))
        ),
        *(
            (rf"\boxed{{{text}}}", gold, 0.0)
            for text, gold in ((r"\neg 5", "5"), (r"x \not= 5", "x = 5"), ("3\\,4", "34"))
        ),
        *(
            (rf"\boxed{{{text}}}", "1000", 1.0)
            for text in ("1000.", r"1\,000", "1\u2009000", "1\u202f000", "1e3", "10^{3}.")
        ),
        *((rf"\boxed{{{text}}}", "Cat", 1.0) for text in (r"\text{cat}", "cat.", "(Cat)", r"\mathrm{Cat}")),
        *((rf"\boxed{{{text}}}", "-5", 1.0) for text in ("\u22125", "\u20135", "\uff0d5", "-5.")),
        (r"\boxed{x \not= 5}", r"x \neq 5", 1.0),
        ("", "72", 0.0),
        (r"\boxed{}", "72", 0.0),
        (r"\boxed{\frac{1}{", "72", 0.0),
        ("\0{{\\", "72", 0.0),
    ],
)
def test_math_verify(response: str, answer: str, expected: float) -> None:
    assert math_verify("", response, answer) == expected


def test_nesting_takes_one_pass() -> None:
    """By the time of this process: seconds for thousands of levels were minutes for so many."""
    begin = time.process_time()
    assert final_answer("\\boxed{" * 40_000) is None
    assert final_answer("\\boxed{" * 40_000 + "7" + "}" * 40_000) == "7"
    assert time.process_time() - begin < 20.0


def test_sympy_is_imported_only_where_it_is_used() -> None:
    import subprocess

    code = "import sys, mega_rl.rewards.builtin; sys.exit('sympy' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_file_imports_its_neighbours_and_leaves_no_trace(tmp_path: Path) -> None:
    """Installed modules win over neighbours of the same name; another folder's neighbour is not mixed up."""
    for folder, number in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "reward_helper_x.py").write_text(f"NUMBER = {number}")
        (tmp_path / folder / "json.py").write_text("raise RuntimeError('shadowed')")
        (tmp_path / folder / "reward.py").write_text(
            "import json, reward_helper_x\ndef f(prompt, response, answer): return reward_helper_x.NUMBER\n"
        )
    path = list(sys.path)
    functions = [resolve(f"{tmp_path / folder / 'reward.py'}:f") for folder in ("a", "b")]
    assert [function("", "", "") for function in functions] == [1, 2]
    assert sys.path == path
