"""Faults of low-rank adapters (see tests/fault_table.py)."""

from __future__ import annotations

from tests.fault import Table

ADAPTERS: Table = {
    ("adapters", "engines/test_adapters.py -k equal_merged"): [
        ("an adapter without its scale", "return turns.flatten(-2) * self.scale", "return turns.flatten(-2)"),
        (
            "the gradient of A from this rank's rows only",
            "            return copy_to_tensor_model_parallel_region(products, group=group)",
            "            return products",
        ),
        ("a reference with the adapters on", "LayerAdapter.enabled = False", "LayerAdapter.enabled = True"),
    ],
    ("adapters", "engines/test_adapters.py -k critic"): [
        (
            "a critic whose head stays as it was",
            "parameter.requires_grad_(PART in name or is_head)",
            "parameter.requires_grad_(PART in name)",
        ),
    ],
    ("adapters", "checkpoint/test_identity.py -k only_one_run"): [
        ("a resumed run may lack its adapters", "for key in {**stored, **current}:", "for key in current:"),
    ],
    ("adapters", "engines/test_adapters.py -k base_stays"): [
        (
            "every shard of A begins as the first",
            "whole[copy.src_row : copy.src_row + copy.rows, copy.src_col : copy.src_col + copy.cols]",
            "whole[copy.src_row : copy.src_row + copy.rows, : copy.cols]",
        ),
        ("the weights below train, too", "parameter.requires_grad_(PART in name or is_head)", "pass"),
        (
            "an adapter merged twice",
            "tensor = add(tensor, own[A], own[B], adapter.scale)",
            "tensor = add(add(tensor, own[A], own[B], adapter.scale), own[A], own[B], adapter.scale)",
        ),
    ],
    ("adapters", "engines/test_adapters.py -k embedded"): [
        (
            "the embedded engine gets the base each time",
            "export = self._export_adapters if self._num_publishes else self._export",
            "export = self._export",
        ),
    ],
    ("adapters", "rollout/sglang/test_sync.py -k adapters"): [
        (
            "servers keep a stale adapter",
            "        tensors = self._weights.adapters()\n",
            '        tensors = vars(self).setdefault("kept", self._weights.adapters())\n',
        ),
        (
            "servers get alpha, not the scale",
            '"lora_alpha": adapter.scale * adapter.rank',
            '"lora_alpha": adapter.alpha',
        ),
        (
            "a server that has lost the base gets the adapter only",
            "self._checked -= merge_failures(lost, self._ranks).keys()",
            "merge_failures(lost, self._ranks)",
        ),
        ("the probe asks the base", '**({"lora_path": self.adapter} if self.adapter else {})', "**{}"),
    ],
}
