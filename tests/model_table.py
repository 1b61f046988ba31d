"""Accepted configurations of transformers: `python -m tests.model_table` rewrites docs/workers/fsdp_workers.md.

For every decoder-only config class with a language-model head, on its defaults, shrunk: the FSDP engine's proof, the
embedded engine's, and the reader of tables.
"""

from __future__ import annotations

import logging
import sys
from collections import defaultdict
from pathlib import Path

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from mega_rl.converters.hf.config import parse_hf_config
from mega_rl.converters.hf.untabled import FOREIGN
from mega_rl.engines.fsdp_proof import find_way
from mega_rl.errors import UserError
from mega_rl.rollout.decoding import prove_decoding
from tests.unit_tests.engines.any_model_cases import FIELDS

PAGE = Path(__file__).parents[1] / "docs/workers/fsdp_workers.md"
BEGIN, END = "<!-- models: python -m tests.model_table -->", "<!-- end of models -->"


def row(model_type: str) -> dict[str, str]:
    """What accepts a model, by engine; a reason where none does."""
    config = CONFIG_MAPPING[model_type](**FIELDS.get(model_type, {}))
    best, why = find_way(config, "auto", True, "cpu")
    verdict = {"fsdp": "refused: " + why if best is None else "packed" if best[1] else "padded"}
    try:
        way = prove_decoding(config, torch.device("cpu"))
        verdict["embedded"] = "batches" if way.left_padded else "prompts of one length"
    except UserError:
        verdict["embedded"] = "not"
    try:
        parse_hf_config(config.to_dict())
        verdict["megatron"] = "table"
    except UserError:
        verdict["megatron"] = "none"
    return verdict


def main() -> None:
    """Write the lists, or those of the named types to standard output."""
    logging.disable(logging.WARNING)
    named = sys.argv[1:]
    groups: dict[str, list[str]] = defaultdict(list)
    for model_type in named or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            config = CONFIG_MAPPING[model_type]()
        except FOREIGN:
            continue
        if config.is_encoder_decoder or config.get_text_config() is not config:
            continue
        verdict = row(model_type)
        if "a token sees later ones" in verdict["fsdp"]:  # an encoder
            continue
        print(model_type, verdict, flush=True)
        groups[f"FSDP, {verdict['fsdp'].partition(':')[0]} rows"].append(model_type)
        groups[f"embedded rollouts, {verdict['embedded']}"].append(model_type)
        groups[f"Megatron-Core, {verdict['megatron']}"].append(model_type)
    lines = [f"- {group} ({len(types)}): {', '.join(types)}." for group, types in sorted(groups.items())]
    text = "\n".join(
        [BEGIN, f"transformers {transformers.__version__}, defaults of each class, shrunk:", "", *lines, END]
    )
    if named:
        print(text)
        return
    page = PAGE.read_text()
    PAGE.write_text(page[: page.index(BEGIN)] + text + page[page.index(END) + len(END) :])


if __name__ == "__main__":
    main()
