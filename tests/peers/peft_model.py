"""Compute with PEFT: `python -m tests.peers.peft_model BASE ADAPTER TOKENS OUT`.

OUT becomes a folder: the adapter as PEFT saves it, and answers.pt with the logits of TOKENS and the merged weights.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM


@torch.no_grad()
def main() -> None:
    """Load the adapter over its base and write what PEFT makes of it."""
    base, adapter, tokens, out = map(Path, sys.argv[1:])
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
    logits = model(torch.load(tokens)).logits
    model.save_pretrained(out)
    torch.save({"logits": logits, "merged": model.merge_and_unload().state_dict()}, out / "answers.pt")


if __name__ == "__main__":
    main()
