"""Inputs of the campaign's runs: a model, data, a reward with a gradient, and the command line of each layout."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.helpers.models import write_digit_tokenizer, write_tiny_checkpoint

STEPS = 12
SAVE_INTERVAL = 2
TIMEOUT_S = 6.0  # deadline of a collective: a stopped rank is noticed after it

# Ranks of each layout and its settings.
LAYOUTS = {
    "tp2": (2, ("engine.megatron.tp=2",)),
    "dp2": (2, ()),
    "pp2": (2, ("engine.megatron.pp=2",)),
    "fsdp2": (2, ("engine.backend=fsdp",)),
    "tp2-dp2": (4, ("engine.megatron.tp=2",)),
    "tp2-pp2": (4, ("engine.megatron.tp=2", "engine.megatron.pp=2")),
}

SETTINGS = (
    *("model.path=m", "model.dtype=fp32", "data.train_files=[d.jsonl]", "data.max_prompt_tokens=8"),
    *("rollout.max_new_tokens=4", "rollout.n=4", "rollout.temperature=1.0", "algorithm.advantage=grpo"),
    *("trainer.microbatch.max_tokens=64", "trainer.prompts_per_step=4", "trainer.minibatch_size=4", "optim.lr=1e-3"),
    *("trainer.run_dir=run", f"trainer.steps={STEPS}", f"trainer.timeout_s={TIMEOUT_S:g}"),
    *(f"checkpoint.save_interval={SAVE_INTERVAL}", "checkpoint.timeout_s=20", "checkpoint.fallback=true"),
    "metrics.progress_bar=false",
)
REWARD = ("reward.function=reward.py:share_of_odd_tokens", "reward.source.workers=0")
POOL = (REWARD[0], "reward.source.workers=1", "reward.source.timeout_s=2", "reward.source.max_failed_share=0")

# The fault that a reward commits, once, is named by a file that the campaign writes and the function removes.
REWARD_PROGRAM = '''"""Reward of a tiny task, and the faults that it commits when a file asks for them."""

import os
import time
from pathlib import Path

HERE = Path(__file__).parent


def share_of_odd_tokens(prompt, response, answer):
    """Return the share of odd digits."""
    order = HERE / "order"
    if order.exists():
        commit(order)
    if (HERE / "last").exists():
        os._exit(int((HERE / "last").read_text().split()[1]))
    return sum(digit in "13579" for digit in response) / max(1, len(response))


def commit(order):
    """Commit the fault that the file names, in the first process that takes it."""
    taken = HERE / "taken"
    try:
        os.rename(order, taken)
    except FileNotFoundError:
        return
    fault = taken.read_text()
    if fault.startswith("end "):
        _, code, where = fault.split()
        if where == "everywhere":
            (HERE / "last").write_text(fault)  # the ranks that come later
        os._exit(int(code))
    if fault == "raise":
        raise ValueError("the reward of the campaign raises")
    if fault == "exit":
        os._exit(7)
    if fault == "system exit":
        raise SystemExit(3)
    if fault == "hang":
        time.sleep(3600)
    if fault == "spin":
        while True:
            pass
    if fault == "output":
        os.write(1, b"x" * (1 << 20))
    if fault == "memory":
        kept = []
        while True:
            kept.append(bytearray(b"x") * (16 << 20))
'''


def write(folder: Path) -> None:
    """Write model, data and reward into a folder."""
    write_tiny_checkpoint(folder / "m", family="qwen3", tied=True)
    write_digit_tokenizer(folder / "m", vocab_size=50)
    rows = [{"prompt": f"{number}+2=", "answer": str(number + 2)} for number in range(6)]
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD_PROGRAM)


def settings(layout: str) -> list[str]:
    """Return the command line of a layout, after `train`, without rewards."""
    return [*SETTINGS, *LAYOUTS[layout][1]]


if __name__ == "__main__":
    write(Path(sys.argv[1]))
