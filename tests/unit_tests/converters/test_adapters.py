"""Adapters that cannot be are refused in one line; folders of other adapters are named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mega_rl.config.schema import AdapterConfig
from mega_rl.converters.hf.config import parse_hf_config
from mega_rl.converters.plan.adapters import adapter_config, read_adapter_config
from mega_rl.converters.plan.parameters import adapted, adapter_problems
from mega_rl.errors import UserError
from mega_rl.parallel.layout import ParallelLayout
from tests.unit_tests.converters.tiny_configs import TINY

IN_TURNS = "is not the weight of one linear layer, or holds several in turns; leave"
REFUSED: dict[str, tuple[str, list[str], dict[str, int], str]] = {  # family, targets, layout, words of the line
    "no such layer": ("qwen3", ["q_proj", "query"], {}, "no linear layer query; legal: down_proj, gate_proj, k_proj,"),
    "embedding": ("qwen3", ["embed_tokens"], {}, "no linear layer embed_tokens; legal:"),
    "router": ("qwen3_moe", ["gate"], {}, "no linear layer gate; legal:"),
    "delta net": ("qwen3_next", ["in_proj_qkvz"], {}, "no linear layer in_proj_qkvz; legal:"),
    "gated queries": ("qwen3_next", ["q_proj"], {}, "no linear layer q_proj; legal:"),
    "experts in one tensor": ("gpt_oss", ["gate_up_proj"], {}, "no linear layer gate_up_proj; legal:"),
    "heads": ("qwen3", ["k_proj"], {"tp": 4}, "tp=4 does not divide num_key_value_heads=2, as adapters of k_proj need"),
    "experts": ("qwen3_moe", ["up_proj"], {"etp": 2}, "etp=2: adapters of experts (up_proj) are not cut; set"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(case: str) -> None:
    family, targets, layout, words = REFUSED[case]
    hf = adapted(parse_hf_config(TINY[family]), AdapterConfig(rank=2, targets=targets), "lm")
    (line,) = adapter_problems(hf, ParallelLayout(world_size=4, **layout))
    assert words in line


def test_heads_matter_to_queries_keys_and_values_only() -> None:
    hf = adapted(parse_hf_config(TINY["qwen3"]), AdapterConfig(rank=2, targets=["o_proj", "up_proj"]), "lm")
    assert not adapter_problems(hf, ParallelLayout(world_size=4, tp=4))


OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "LOHA"}, "peft_type='LOHA'"),
    ({"use_dora": True}, "use_dora=True"),
    ({"r": 0}, "r=0"),
    ({"lora_alpha": "8"}, "lora_alpha='8'"),
    ({"target_modules": "all-linear"}, "target_modules='all-linear'"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head']"),
    ({"rank_pattern": {"q_proj": 8}}, "rank_pattern={'q_proj': 8}"),
]


@pytest.mark.parametrize(("change", "words"), OTHERS)
def test_other_adapters_are_named(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    hf = adapted(parse_hf_config(TINY["qwen3"]), AdapterConfig(rank=2), "lm")
    assert hf.adapter is not None
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter_config(hf.adapter, "base") | change))
    with pytest.raises(UserError, match="legal: LoRA of one rank on linear layers") as refusal:
        read_adapter_config(tmp_path)
    assert f"adapter_config.json: {words}: legal" in str(refusal.value)


def test_settings_must_describe_the_folder(tmp_path: Path) -> None:
    """The critic does not begin from the policy's adapter, so its settings are not compared."""
    settings = AdapterConfig(rank=2, alpha=4.0, targets=["v_proj", "q_proj"], path=str(tmp_path))
    hf = adapted(parse_hf_config(TINY["qwen3"]), replace(settings, path=""), "lm")
    assert hf.adapter is not None
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter_config(hf.adapter, "base")))
    begun = adapted(hf, settings, "lm").adapter
    assert begun is not None
    assert begun.path == str(tmp_path)
    with pytest.raises(UserError) as refusal:
        adapted(hf, replace(settings, rank=4, rs=True), "lm")
    assert str(refusal.value).splitlines() == [
        f"model.adapter.rank=4: the adapter in {tmp_path} has 2; set that",
        f"model.adapter.rs=True: the adapter in {tmp_path} has False; set that",
    ]
    assert adapted(hf, replace(settings, rank=4), "value").adapter is not None
    with pytest.raises(UserError, match="cannot be read"):
        adapted(hf, replace(settings, path=str(tmp_path / "absent")), "lm")
