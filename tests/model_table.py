"""Accepted configurations of transformers: `python -m tests.model_table` rewrites docs/workers/fsdp_workers.md.

Every decoder-only config class with a language-model head, on its defaults, shrunk: the FSDP engine with the numbers of
transformers, the embedded engine's proof, and the reader of Megatron-Core's tables. With another transformers than the
one in constraints.txt it writes a second list, of what is new there.
"""

from __future__ import annotations

import logging
import re
import sys
import tempfile
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
from mega_rl.verify.layouts import FP32, LayoutErrors
from mega_rl.verify.run import problems
from tests.unit_tests.engines.any_model_cases import FIELDS, measured, small_config, write_model

ROOT = Path(__file__).parents[1]
PAGE, CONSTRAINTS = ROOT / "docs/workers/fsdp_workers.md", ROOT / "constraints.txt"
BEGIN, END = "<!-- models: python -m tests.model_table -->", "<!-- end of models -->"
NEWER, NEWER_END = "<!-- models: the same with another transformers -->", "<!-- end of other models -->"
LISTS = re.compile(r"^- (.+): (.+)\.$", re.MULTILINE)
THE_OTHERS = ("embedded rollouts, batches", "Megatron-Core, none", "Megatron-Core, table")  # stand in no list


def of_training(types: list[str]) -> dict[str, str]:
    """How the FSDP engine trains each type, or why not."""
    verdicts, written = {}, []
    with tempfile.TemporaryDirectory(prefix="model_table_") as folder:
        for model_type in types:
            try:
                write_model(Path(folder, model_type), model_type)
                written.append(model_type)
            except FOREIGN:
                verdicts[model_type] = "refused: its defaults make no model"
        for first in range(0, len(written), 10):
            for model_type, errors in measured(Path(folder), written[first : first + 10]).items():
                verdicts[model_type] = _verdict(errors, model_type)
    return verdicts


def _verdict(errors: LayoutErrors | str, model_type: str) -> str:
    if isinstance(errors, str):
        _, _, why = errors.partition(": ")
        return "refused: " + re.sub(r"/tmp/\S*/(\w|-)+(/[\w.]+)?: ", "", why.split("; ")[0])[:120]
    if far := problems(errors, FP32):
        return f"refused: {far[0]}"
    way, _ = find_way(small_config(model_type), "auto", True, "cpu")
    return "packed" if way is not None and way[1] else "padded"


def of_decoding(model_type: str) -> str:
    """How the embedded engine decodes."""
    try:
        way = prove_decoding(small_config(model_type), torch.device("cpu"))
        return "batches" if way.left_padded else "prompts of one length"
    except (*FOREIGN, UserError):
        return "not"


def of_table(model_type: str) -> str:
    """Whether Megatron-Core has a table."""
    try:
        parse_hf_config(CONFIG_MAPPING[model_type](**FIELDS.get(model_type, {})).to_dict())
        return "table"
    except (*FOREIGN, UserError):
        return "none"


def decoders() -> list[str]:
    """Types of causal language models that read text alone."""
    types = []
    for model_type in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            config = CONFIG_MAPPING[model_type]()
        except FOREIGN:
            continue
        if not config.is_encoder_decoder and config.get_text_config() is config:
            types.append(model_type)
    return types


def main() -> None:
    """Write the lists, or those of the named types to standard output."""
    logging.disable(logging.WARNING)
    named = sys.argv[1:]
    groups: dict[str, list[str]] = defaultdict(list)
    for model_type, verdict in of_training(named or decoders()).items():
        if "a token sees later ones" in verdict:  # an encoder
            continue
        print(model_type, verdict, flush=True)
        groups[f"FSDP, {verdict.partition(': ')[0]}"].append(model_type)
        groups[f"embedded rollouts, {of_decoding(model_type)}"].append(model_type)
        groups[f"Megatron-Core, {of_table(model_type)}"].append(model_type)
    page = PAGE.read_text()
    pinned = page[page.index(BEGIN) : page.index(END)]
    newer = f"transformers=={transformers.__version__}\n" not in CONSTRAINTS.read_text()
    begin, end = (NEWER, NEWER_END) if newer else (BEGIN, END)
    known = dict(LISTS.findall(pinned)) if newer else {}
    counts = ", ".join(f"{group} {len(types)}" for group, types in sorted(groups.items()))
    lines = [
        begin,
        f"transformers {transformers.__version__}, defaults of each class, shrunk: {counts}.{' New:' * newer}",
        "",
    ]
    for name, types in sorted(groups.items()):
        fresh = sorted(set(types) - set(known.get(name, "").split(", ")))
        if fresh and name not in THE_OTHERS:
            lines.append(f"- {name}: {', '.join(fresh)}.")
    text = "\n".join([*lines, end])
    if named:
        print(text)
        return
    PAGE.write_text(page[: page.index(begin)] + text + page[page.index(end) + len(end) :])


if __name__ == "__main__":
    main()
