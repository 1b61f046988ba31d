"""The tables and the reading of config.json against transformers: names, shapes and settings of saved models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from mega_rl.converters.families import FAMILIES
from mega_rl.converters.hf.config import parse_hf_config
from mega_rl.converters.hf.untabled import config_of
from mega_rl.converters.plan.parameters import as_on_disk, hf_tensors
from mega_rl.converters.safetensors.reader import CheckpointReader
from tests.unit_tests.converters.tiny_configs import TINY


def transformers_model(config: dict[str, Any]) -> PreTrainedModel:
    """A model of transformers with this config.json, or of the class that stands in where it lacks one."""
    model_type = FAMILIES[config["model_type"]].transformers_type
    known = {key: value for key, value in config.items() if key != "auto_map"}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(known | {"model_type": model_type}))


def shapes_on_disk(path: Path) -> dict[str, tuple[int, ...]]:
    with CheckpointReader(path) as reader:
        return {name: tuple(tensor.shape) for name, tensor in reader.tensors.items()}


# Without its original format, transformers saves the experts of a layer as one tensor.
SPELLINGS = [
    (name, fused) for name in TINY for fused in (False, True) if not fused or "num_experts_per_tok" in TINY[name]
]


@pytest.mark.parametrize(("name", "fused"), SPELLINGS)
def test_tensors_are_those_that_transformers_saves(name: str, fused: bool, tmp_path: Path) -> None:
    config = parse_hf_config(TINY[name])
    transformers_model(TINY[name]).save_pretrained(tmp_path, save_original_format=not fused)
    on_disk = shapes_on_disk(tmp_path)
    assert as_on_disk(config, on_disk).fused_experts == (fused or config.fused_experts)
    expected = {n: t.shape for n, t in hf_tensors(as_on_disk(config, on_disk), head="lm").items()}
    assert on_disk.keys() - expected.keys() == set()
    assert expected.keys() - on_disk.keys() == set()
    assert expected == on_disk


@pytest.mark.parametrize("name", FAMILIES)
def test_absent_keys_have_the_values_of_the_class(name: str) -> None:
    """A file with nothing but sizes means what the class of transformers makes of them."""
    sizes = {"num_hidden_layers": 4, "hidden_size": 2048, "num_attention_heads": 32, "intermediate_size": 56}
    sizes |= {"vocab_size": 99, "max_position_embeddings": 131072}
    if FAMILIES[name].mla is not None:
        sizes |= {"num_key_value_heads": 32, "num_experts_per_tok": 8}
    if name == "dots1":  # its class gives no numbers, and does not normalise weights unless told to
        sizes |= {"n_routed_experts": 8, "num_experts_per_tok": 1}
    whole = CONFIG_MAPPING[FAMILIES[name].transformers_type](**sizes).to_dict()
    assert parse_hf_config(sizes | {"model_type": name}) == parse_hf_config(whole | {"model_type": name})
