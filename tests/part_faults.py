"""Faults of named parts of rewards and of turns, for tests/planted_faults.py (see tests/fault_table.py)."""

from __future__ import annotations

from tests.fault import Table

PARTS: Table = {
    ("parts", "algorithms/test_group_advantages.py"): [
        (
            "GDPO's parts without their deviations",
            "scores += weight * centred / (deviation + self.eps)",
            "scores += weight * centred",
        ),
        (
            "GDPO's parts without their weights",
            "scores += weight * centred / (deviation + self.eps)",
            "scores += centred / (deviation + self.eps)",
        ),
        (
            "GDPO's sum over the deviation of the rank's own batch",
            "sums = inputs.sum_over_ranks((torch.stack(",
            "sums = ((torch.stack(",
        ),
    ],
    ("parts", "rewards/test_role.py"): [
        (
            "a reward without the weights of its parts",
            "sum(self._weights.get(name, 1.0) * values[name] for name in own)",
            "sum(values[name] for name in own)",
        ),
        (
            "parts of the row before",
            "columns[rows] = torch.tensor(numbers, dtype=torch.float32)",
            "columns[[row - 1 for row in rows]] = torch.tensor(numbers, dtype=torch.float32)",
        ),
        (
            "a part that others lack is dropped",
            "if names != own:",
            "if not {*own} <= {*names}:",
        ),
        (
            "what a tool wrote is the policy's answer",
            'return Response("\\n".join(texts), sum(own)',
            "return Response(text, sum(own)",
        ),
        ("a tool's tokens count as sampled", "sum(own), finish, turns=texts", "len(own), finish, turns=texts"),
    ],
    ("parts", "rewards/test_call.py"): [
        ("parts in the order of the function's mapping", "for name in sorted(value)}", "for name in value}")
    ],
    ("parts", "trainer/test_dynamic_sampling.py"): [
        (
            "dynamic sampling drops prompts that differ in parts",
            "if by_parts and rewards.parts is not None:",
            "if not by_parts and rewards.parts is not None:",
        ),
        (
            "rewards of other samples after dynamic sampling",
            "columns = gather_column(rewards.columns(), ranks)[keys.argsort()]",
            "columns = gather_column(rewards.columns(), ranks)",
        ),
    ],
    ("parts", "trainer/test_overlong.py"): [
        (
            "the punishment of length is no part",
            'parts = RewardParts((*parts.names, "overlong"), (*parts.weights, overlong.penalty), values)',
            "pass",
        )
    ],
}
