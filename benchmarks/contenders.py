"""The two programs that benchmarks/e2e.py compares, each doing one training step whenever it is told to.

Protocol: the driver writes a line to the contender's command pipe and reads one JSON line from its report pipe:
{"seconds": ..., "tokens": ..., ...}. Between two steps a contender only waits.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

PROMPTS = 64
SAMPLES = 4
PROMPT_TOKENS = 6
NEW_TOKENS = 64
KL_COEF = 0.04
LEARNING_RATE = 1e-6
MODEL: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def write_inputs(folder: Path) -> None:
    """A random Qwen3 checkpoint with a word tokenizer and prompts of six words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**MODEL, bos_token_id=None, eos_token_id=None, pad_token_id=0))
    model.save_pretrained(folder / "model")
    words = ["<pad>", "<eos>", *(f"w{number}" for number in range(2, MODEL["vocab_size"]))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.save_pretrained(folder / "model")
    chosen = torch.randint(2, MODEL["vocab_size"], (1024, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))
    rows = [{"prompt": " ".join(f"w{token}" for token in row), "answer": ""} for row in chosen.tolist()]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def score(prompt: str, response: str, answer: str) -> float:
    """The share of even words: varies between samples and costs next to nothing."""
    words = response.split()
    return sum(word[-1] in "02468" for word in words) / max(len(words), 1)


class Pipes:
    """The contender's end of the two pipes."""

    def __init__(self, folder: Path) -> None:
        self.commands: TextIO = open(folder / "commands")  # noqa: SIM115
        self.reports: TextIO = open(folder / "reports", "w")  # noqa: SIM115

    def wait(self) -> bool:
        """Block until the next step is due; False when there is none."""
        return self.commands.readline().strip() == "step"

    def report(self, record: dict[str, Any]) -> None:
        """Tell the driver what a step cost."""
        self.reports.write(json.dumps(record) + "\n")
        self.reports.flush()


def run_mega_rl(folder: Path) -> None:
    """One of two data-parallel ranks of one thread each."""
    import torch

    torch.set_num_threads(1)
    from mega_rl.accelerator import prepare
    from mega_rl.config.loader import load
    from mega_rl.parallel.comm import GroupRanks

    overrides = [
        f"model.path={folder / 'model'}",
        "model.dtype=fp32",
        f"data.train_files=[{folder / 'train.jsonl'}]",
        f"data.max_prompt_tokens={PROMPT_TOKENS}",
        f"rollout.n={SAMPLES}",
        f"rollout.max_new_tokens={NEW_TOKENS}",
        f"reward.function={Path(__file__)}:score",
        "algorithm.advantage=grpo",
        "algorithm.kl.placement=loss",
        f"algorithm.kl.coef={KL_COEF}",
        f"optim.lr={LEARNING_RATE}",
        f"trainer.prompts_per_step={PROMPTS}",
        f"trainer.minibatch_size={PROMPTS}",
        "trainer.microbatch.max_tokens=2304",
        "trainer.steps=1000",
        f"trainer.run_dir={folder / 'run'}",
        "metrics.tensorboard=false",
        "metrics.progress_bar=false",
        "metrics.rollout_interval=0",
    ]
    config = load(None, overrides)
    accelerator = prepare("cpu")
    from mega_rl.assemble import build_trainer, session

    with session(config, accelerator) as groups, ExitStack() as resources:
        trainer = build_trainer(config, accelerator, groups, stop_requested=lambda: False, resources=resources)
        trainer.sync.publish()
        world = GroupRanks(groups.world)
        pipes = Pipes(folder / "mega_rl") if world.rank == 0 else None
        step = 0
        while True:
            go = torch.tensor(int(pipes.wait()) if pipes is not None else 0)
            if not int(world.broadcast(go)):
                break
            start = time.perf_counter()
            trainer.timer.reset()
            metrics = trainer.step(step) | trainer.timer.metrics()
            seconds = time.perf_counter() - start
            step += 1
            if pipes is not None:
                phases = {name: value for name, value in metrics.items() if name.startswith("time/")}
                pipes.report({"seconds": seconds, "tokens": metrics["rollout/response_tokens"], "phases": phases})


def run_trl(folder: Path) -> None:
    """Run TRL's GRPOTrainer in one process of two threads."""
    import torch

    torch.set_num_threads(2)
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    pipes = Pipes(folder / "trl")
    tokens: list[int] = []

    def reward(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        tokens.append(sum(len(ids) for ids in completion_ids))
        return [score(p, c, "") for p, c in zip(prompts, completions, strict=True)]

    class OneStepAtATime(TrainerCallback):
        """Waits before each step and reports after it."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not pipes.wait():
                os._exit(0)
            tokens.clear()
            self.start = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            pipes.report({"seconds": time.perf_counter() - self.start, "tokens": float(sum(tokens))})

    batch = int(os.environ.get("TRL_BATCH", "64"))
    arguments = GRPOConfig(
        output_dir=str(folder / "trl-run"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=PROMPTS * SAMPLES // batch,
        num_generations=SAMPLES,
        max_completion_length=NEW_TOKENS,
        generation_kwargs={"min_new_tokens": NEW_TOKENS},
        beta=KL_COEF,
        learning_rate=LEARNING_RATE,
        max_steps=1000,
        gradient_checkpointing=False,
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        reward_funcs=reward,
        args=arguments,
        train_dataset=load_dataset("json", data_files=str(folder / "train.jsonl"), split="train"),
        callbacks=[OneStepAtATime()],
    )
    trainer.train()


if __name__ == "__main__":
    contenders: dict[str, Callable[[Path], None]] = {"mega_rl": run_mega_rl, "trl": run_trl}
    contenders[sys.argv[1]](Path(sys.argv[2]))
