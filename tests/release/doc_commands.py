"""Run the commands of README, CONTRIBUTING and docs in a fresh copy of the repository, in the order of the pages.

`make doc-commands` prints each with how it ended. A command of the tables here that no page has is an error. Models and
data by name come from a server on loopback that has small ones under the real names; where a command asks for eight
GPUs, it runs on two ranks with a few tokens. Exit code 0 if all is as it should be, else 1.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.helpers.hub_server import Hub, dataset_card, folder_files, parquet_bytes, serve_hub
from tests.release.sources import ROOT, copy_sources

PAGES = ("README.md", "CONTRIBUTING.md", "tests/special_distributed/README.md", "docs/own_data.md", "docs/data.md")
PAGES += ("docs/checkpoint.md", "docs/converters.md", "docs/package.md", "docs/trackers.md", "docs/verify.md")
PAGES += ("docs/versions.md", "docs/workers/fsdp_workers.md", "docs/workers/megatron_workers.md")
PAGES += ("docs/workers/sglang_worker.md", "docs/report.md", "docs/gsm8k.md")
PAGES += ("docs/evaluation.md", "docs/replay.md", "docs/sandbox.md")
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
INLINE = re.compile(r"^\| `((?:mega-rl|make) [^`]*|mega-rl|make)` \|", re.MULTILINE)  # first cells of tables
COMMAND = re.compile(r"(OMP_NUM_THREADS=1 )?(mega-rl|make|python|pip|torchrun|bash|srun|\.venv/bin/python) ")
FILE = re.compile(r"# (\w+\.(?:py|yaml))\n")  # first line of a block that is a file

# A real model's recipe on two cores: two ranks, two prompts, a few tokens, one step.
SMALL = "model.dtype=fp32 trainer.steps=1 trainer.prompts_per_step=2 trainer.minibatch_size=2 rollout.n=2"
SMALL += " rollout.max_new_tokens=8 trainer.microbatch.max_tokens=2048"
REAL = re.compile(r"(train --config|plan(?= \S+ engine)) (gsm8k_qwen3_[\w.]+)")
ONE = "gsm8k_qwen3_0.6b_1gpu"
ALONE = "data.prompt_key=question data.val_files=[] trainer.val_interval=0"
DEADLINE_S = 900

# Commands that do not run here -> why.
APART: dict[str, str] = {
    "make setup": "part of every target",
    "make test": "by itself: the whole of CI",
    "make check": "by itself: the whole of CI",
    "make fmt": "part of nothing: changes files",
    "make test-newest": "by itself: installs Megatron-Core",
    "make bench": "by itself: a benchmark of minutes",
    "make special-distributed": "by itself: `make test` runs all of its programs",
    "make test-versions": "by itself: an environment of its own",
    "make test-versions WITH='transformers==5.17.0'": "by itself: an environment of its own",
    'make test-versions WITH="$(python tests/oldest.py)"': "by itself: an environment of its own",
    "pip install mega_rl": "by make wheel-check, from the wheel",
    "mega-rl train --config gsm8k_qwen3_32b_64gpu --nnodes 8 --nproc-per-node 8 --node-rank 0 --master-addr HOST": (
        "by tests/unit_tests/operations/launcher: needs a launcher on each node"
    ),
    "mega-rl train --config my.yaml metrics.trackers=[wandb] metrics.project=sums metrics.run_name=first": (
        "by tests/unit_tests/tracking/metrics/test_trackers.py, with the real client"
    ),
}
# Commands whose results would be in the way of others, or that are long -> what is added.
ADDED: dict[str, str] = {
    "mega-rl quickstart": "--run-dir runs/again",
    "mega-rl data gsm8k data/gsm8k": "--force",
    "mega-rl train --config letters.yaml": "trainer.steps=2",
    "mega-rl train --config quickstart --nproc-per-node 2 engine.backend=fsdp": "trainer.steps=2",
    "torchrun --nproc-per-node 2 -m mega_rl.cli train --config quickstart_sglang": "trainer.steps=2",
}
# Parts of commands -> what is there instead, one after the other.
REPLACED: dict[str, str] = {
    "srun ": "",
    "--model HF_DIR --twin --layouts tp2+ep2+sp": "--model models/mixture --twin --layouts tp2+ep2+sp",
    "import HF_DIR OUT": "import models/dense out/imported --overwrite",
    "export OUT HF_OUT --hf": "export out/imported out/hf --overwrite --hf",
    "HF_DIR": "models/dense",
    "HF_OUT": "out/hf",
    "runs/x OUT": "runs/x out/x",
    "report RUN OTHER": "report runs/quickstart runs/x",
    "page.html": "out/page.html",
    " RUN": " runs/quickstart",
    "my.yaml": ONE,
    "RECIPE": f"{ONE} data.train_files=[org/problems:default:train] {ALONE} trainer.run_dir=runs/a",
    "interval=50": "interval=1",
    "step_000051": "step_000001",
    "[org/problems:default:train] data.prompt_key=question": f"[org/problems:default:train] {ALONE}",
    "gsm8k_qwen3_8b_8gpu ": "gsm8k_qwen3_8b_8gpu engine.megatron.tp=2 ",
    "--nproc-per-node 8": "--nproc-per-node 2",
    "letters.yaml": "letters.yaml model.dtype=fp32 trainer.prompts_per_step=4 trainer.minibatch_size=4",
    "sequence_parallel=true engine.megatron.pp=2": "sequence_parallel=true engine.megatron.pp=2 trainer.steps=2",
    "runs/again": "runs/gsm8k trainer.steps=2",
    "gsm8k=gsm8k_test.jsonl": "gsm8k=openai/gsm8k:main:test",
    "math=math500.jsonl": "math=org/problems",
    "n=16 validation.k=[1,4,16]": "n=4 validation.k=[1,4]",
    "max_new_tokens=2048": "max_new_tokens=8 data.prompt_key=question model.dtype=fp32",
}
TEMPLATE = (
    "{% if tools is defined and tools %}tools{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def commands(text: str) -> Iterator[str]:
    """Yield the commands of a page in their order, without comments; a page's blocks that are files are none."""
    actual: list[tuple[int, str]] = [(match.start(), match[1]) for match in INLINE.finditer(text)]
    for block in BLOCK.finditer(text):
        if block[1] not in ("", "sh", "bash") or FILE.match(block[2]):
            continue
        for line in re.sub(r"\s*\\\n\s*", " ", block[2]).splitlines():
            command = re.sub(r"\s+#.*$", "", line).strip()
            if COMMAND.match(command):
                actual.append((block.start(), command))
    yield from (command for _, command in sorted(actual, key=lambda item: item[0]))


def files(text: str) -> Iterator[tuple[str, str]]:
    """Yield (name, content) of the files that a page has its reader write."""
    for block in BLOCK.finditer(text):
        named = FILE.match(block[2])
        if named:
            yield named[1], block[2]


def how(command: str, number: int) -> str:
    """Return a documented command as it runs here; number: of the folder of a training run that names none."""
    run = command
    for old, new in REPLACED.items():
        run = run.replace(old, new)
    run = " ".join([REAL.sub(rf"\1 \2 {SMALL}", run), *filter(None, [ADDED.get(command)])])
    apart = " train " in run and not re.search(r"run_dir=|letters|--print-config", run)
    return f"{run} trainer.run_dir=runs/{number}" if apart else run


def write_model(folder: Path, *, family: str) -> None:
    """Write a small checkpoint whose tokenizer knows every byte and Qwen's marks of turns."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from tests.helpers.models import write_tiny_checkpoint

    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = Tokenizer(models.BPE())
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    letters.train_from_iterator([], trainers.BpeTrainer(special_tokens=marks, initial_alphabet=alphabet))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token=marks[2], pad_token=marks[0])
    tokenizer.chat_template = TEMPLATE
    settings = {"vocab_size": 260, "eos_token_id": 2, "max_position_embeddings": 4096, "num_attention_heads": 8}
    write_tiny_checkpoint(folder, family=family, **settings)
    tokenizer.save_pretrained(folder)


def publish(hub: Hub, model: Path) -> None:
    """Give the server small models and data under the names that the documents use."""
    for size in ("0.6B", "1.7B", "8B", "32B"):
        hub.add("models", f"Qwen/Qwen3-{size}", folder_files(model))
    gsm8k = parquet_bytes(question=["How many are 1 and 1?"] * 4, answer=["1+1 = <<1+1=2>>2\n#### 2"] * 4)
    card = dataset_card(main=["train", "test"])
    hub.add("datasets", "openai/gsm8k", {"README.md": card, "main/train.parquet": gsm8k, "main/test.parquet": gsm8k})
    problems = parquet_bytes(problem=["Add 1 to 1."] * 4, solution=["It is $\\boxed{2}$."] * 4)
    for name, split in (("DigitalLearningGmbH/MATH-lighteval", "train"), ("HuggingFaceH4/MATH-500", "test")):
        card = dataset_card(default=[split])
        hub.add("datasets", name, {"README.md": card, f"default/{split}.parquet": problems})
    rows = parquet_bytes(question=["How many are 2 and 2?"] * 4, answer=["4"] * 4)
    hub.add("datasets", "org/problems", {"README.md": dataset_card(default=["train"]), "default/train.parquet": rows})


def execute(command: str, folder: Path, variables: Mapping[str, str]) -> tuple[int, float, str]:
    """Run a command in the copy; returns (exit code, seconds, end of its output)."""
    start = time.perf_counter()
    try:
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, timeout=DEADLINE_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return -1, time.perf_counter() - start, f"took longer than {DEADLINE_S} s"
    text = done.stdout.decode(errors="replace")
    return done.returncode, time.perf_counter() - start, "\n".join(text.splitlines()[-25:])


def unknown(documented: list[str]) -> list[str]:
    """Return a line for each command, or part of one, that the tables have and no page has."""
    parts = [part for part in REPLACED if not any(part in command for command in documented)]
    return [f"no page has: {one}" for one in [*({*APART, *ADDED} - set(documented)), *parts]]


def run_all(folder: Path, hub: Hub, only: str) -> int:
    """Run the commands of all pages that hold `only`; prints a line each, returns the number of failures."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    variables |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "hf_home"), "COLUMNS": "100"}
    variables["PATH"] = f"{folder / '.venv/bin'}{os.pathsep}{os.environ['PATH']}"
    failures, done = 0, set()
    for page in PAGES:
        text = (folder / page).read_text(encoding="utf-8")
        for name, content in files(text):
            (folder / name).write_text(content, encoding="utf-8")
        print(f"\n{page}\n", flush=True)
        for command in commands(text):
            if only not in command or command in done:
                continue
            done.add(command)
            if command in APART:
                print(f"| `{command}` | {APART[command]} |", flush=True)
                continue
            run = how(command, len(done))
            code, seconds, end = execute(run, folder, variables)
            failures += code != 0
            as_run = "" if run == command else f", as `{run}`"
            print(f"| `{command}` | exit code {code}, {seconds:.0f} s{as_run} |", flush=True)
            if code:
                print(end, flush=True)
    return failures


def main() -> int:
    """Run the check; returns the exit code."""
    parser = argparse.ArgumentParser(prog="doc_commands", description=__doc__, allow_abbrev=False)
    parser.add_argument("--only", default="", help="commands that hold this text")
    parser.add_argument("--keep", type=Path, help="a new folder for the copy, which stays")
    options = parser.parse_args()
    documented = [command for page in PAGES for command in commands((ROOT / page).read_text(encoding="utf-8"))]
    problems = unknown(documented)
    for problem in problems:
        print(problem)
    folder = Path(tempfile.mkdtemp(prefix="doc_commands_")) if options.keep is None else options.keep.resolve()
    try:
        copy = copy_sources(folder / "copy")
        subprocess.run(["make", "setup"], cwd=copy, check=True)
        write_model(copy / "models/dense", family="qwen3")
        write_model(copy / "models/mixture", family="qwen3_moe")
        with serve_hub() as hub:
            publish(hub, copy / "models/dense")
            failures = run_all(copy, hub, options.only)
    finally:
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"\n{failures} commands failed")
    return int(bool(failures or problems))


if __name__ == "__main__":
    sys.exit(main())
