"""Faults of the order of prompts: measured success, streams (see tests/fault_table.py)."""

from __future__ import annotations

from tests.fault import Table

ORDER: Table = {
    ("order", "data/test_conversation.py"): [
        (
            "the answer of the next row after each dropped one",
            "prompts.append(prompt)",
            "prompts.append(replace(prompt, answer=rows[len(prompts)].prompt.answer))",
        )
    ],
    ("order", "trainer/order/test_resumed_orders.py"): [
        (
            "success rates left out of checkpoints",
            "if prompts.rates is not None or prompts.order.numbers():",
            "if prompts.rates is None and prompts.order.numbers():",
        ),
        (
            "success of this replica's samples alone",
            "right, total = ranks.sum(counts).unbind(1)",
            "right, total = counts.unbind(1)",
        ),
    ],
    ("order", "data/test_order.py"): [
        (
            "a visit counts no more than those before it",
            "self.samples[own] = self._memory * self.samples[own] + new[1]",
            "self.samples[own] = self.samples[own] + new[1]",
        ),
        (
            "solved prompts count as learnable",
            '"learnable": (lambda rate: rate * (1.0 - rate), 1.0 / 6.0),',
            '"learnable": (lambda rate: rate, 1.0 / 6.0),',
        ),
        (
            "a prompt that epochs give is drawn by weight, too",
            "left[list(taken)], free[list(taken)] = 0, False",
            "pass",
        ),
    ],
    ("order", "trainer/order/test_measuring.py"): [
        (
            "failed samples count as wrong",
            "known = scored_rows(rollout, rewards) & ~values.isnan()",
            "known = ~values.isnan()",
        ),
        (
            "greedy responses are measured",
            "            rewards = self.rewards.score(rollout, prompts).totals\n",
            "            rewards = self.rewards.score(rollout, prompts)\n"
            "            if self.success is not None:\n"
            "                self.success.record(Samples(prompts, rollout, rewards, torch.arange(0)), self.ranks)\n"
            "            rewards = rewards.totals\n",
        ),
    ],
    ("order", "data/test_stream.py"): [
        (
            "a stream goes on at the block after its position",
            "skip = at.row if place == at.shard else 0",
            "skip = at.row + 1 if place == at.shard and at.row else 0",
        ),
        (
            "every block of a stream in the same order",
            "key=(self.plan.seed, STREAM, 1, at.block, *self.plan.key)",
            "key=(self.plan.seed, STREAM, 1, 0, *self.plan.key)",
        ),
    ],
}
