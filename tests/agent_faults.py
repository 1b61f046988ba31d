"""Faults of agents: tokens between turns, tools (see tests/fault_table.py)."""

from __future__ import annotations

from tests.fault import Table

AGENTS: Table = {
    ("agents", "agents/test_templates.py"): [
        ("the line end after a stop token is lost", "return ids[1:]", "return ids[2:]"),
        (
            "special tokens in a tool's answer become ids",
            'return change(value) if is_data and key in ("content", "text", "name", "tool_call_id") else value',
            "return value",
        ),
        (
            "template and tool spell a special token together",
            "return text if self.special.findall(text) == self.special.findall(other) else other",
            "return text",
        ),
        (
            "text between turns that changes during a conversation passes",
            "if other[renderer.closing(other, form)[1] :] != after[place:]:",
            "if other[renderer.closing(other, form)[1] :] == 0:",
        ),
        ("a new branch keeps thoughts that the template drops", "rest = turn[ends[-1] :]", "rest = turn"),
        ("a turn goes on after another stop token", "if last != rule.stop:", "if last < 0:"),
    ],
    ("agents", "agents/test_tools.py"): [
        ("calls in thoughts are made", 'text.rpartition("</think>")[2]', "text"),
        ("a late tool holds its answer", "call), self._timeout_s)", "call), 60 + self._timeout_s)"),
        ("arguments of another type reach a tool", "if kinds and not _is_of(value, kinds):", "if kinds and not kinds:"),
        ("true is a whole number", 'return "boolean" in kinds', "return True"),
    ],
}
