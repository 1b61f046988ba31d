"""The two programs that benchmarks/e2e.py compares, each doing one training step at each command.

    python contenders.py mega_rl FOLDER       # FOLDER has task.json, model/, train.jsonl and this contender's pipes

The answer to a command is {"seconds": ..., "tokens": ..., ...}. Between two steps a contender only waits.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from driver import Commands

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
END = 1  # the token that ends a response, which the random model cannot sample


@dataclass(frozen=True)
class Task:
    """The work of a step; the same for both trainers."""

    prompts: int = 64
    samples: int = 4  # of a prompt
    prompt_tokens: int = 6
    new_tokens: int = 64
    kl_coef: float = 0.04
    ranks: int = 2  # of mega_rl, one thread each; TRL has one process of as many threads
    trl_batch: int = 64  # sequences of a micro-batch of TRL
    max_tokens: int = 2304  # of a micro-batch of mega_rl
    stop_token: int = END

    @classmethod
    def read(cls, folder: Path) -> Task:
        """Return the task of a folder."""
        return cls(**json.loads((folder / "task.json").read_text()))


TASK = Task()
TINY = Task(prompts=4, samples=2, new_tokens=8, trl_batch=8)
REAL = Task(prompts=8, samples=4, prompt_tokens=64, new_tokens=64, kl_coef=0.0, ranks=1, trl_batch=8, max_tokens=704)


def write_inputs(folder: Path, task: Task = TASK) -> None:
    """Write a random Qwen3 checkpoint with a word tokenizer, prompts of six words, and the task."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**MODEL, bos_token_id=None, eos_token_id=END, pad_token_id=0))
    with torch.no_grad():
        make_unlikely(model, END)
    model.save_pretrained(folder / "model")
    words = ["<pad>", "<eos>", *(f"w{number}" for number in range(2, MODEL["vocab_size"]))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.save_pretrained(folder / "model")
    generator = torch.Generator().manual_seed(1)
    chosen = torch.randint(2, MODEL["vocab_size"], (1024, task.prompt_tokens), generator=generator)
    write_task(folder, task, [" ".join(f"w{token}" for token in row) for row in chosen.tolist()])


def make_unlikely(model: Any, token: int) -> None:
    """Make the logit of a token lower than all others by hundreds, so that every response has the same length.

    Every hidden state gets the same large positive first entry: all embeddings have it and no layer writes to it. The
    token's row of the tied head has a large negative one.
    """
    embedding = model.get_input_embeddings().weight
    embedding[:, 0] = 1.0
    embedding[token] = 0.0
    embedding[token, 0] = -50.0
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0.0
        layer.mlp.down_proj.weight[0] = 0.0


def copy_inputs(folder: Path, model: Path, task: Task) -> Task:
    """Write the inputs for a pretrained model: its folder, with a token that it never says as the only end.

    The tokenizer names it, too, since TRL ends responses at the tokenizer's end of sequence.

    Returns:
        The task, with the id of that token.
    """
    from transformers import AutoTokenizer

    shutil.copytree(model, folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    reserved = [token for token in tokenizer.all_special_ids if token != tokenizer.eos_token_id]
    stop = max(set(tokenizer.added_tokens_decoder) - {tokenizer.eos_token_id, tokenizer.pad_token_id}, default=None)
    stop = max(reserved) if stop is None else stop
    for name in ("config.json", "generation_config.json"):
        path = folder / "model" / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": stop}))
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(stop)
    tokenizer.save_pretrained(folder / "model")
    sums = [(a, b) for a in range(32) for b in range(32)]
    task = Task(**{**asdict(task), "stop_token": stop})
    write_task(folder, task, [f"What is {a} plus {b}? Reply with the number only, nothing else." for a, b in sums])
    return task


def write_task(folder: Path, task: Task, prompts: list[str]) -> None:
    """Write the prompts and the task."""
    rows = [{"prompt": prompt, "answer": ""} for prompt in prompts]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "task.json").write_text(json.dumps(asdict(task)))


def score(prompt: str, response: str, answer: str) -> float:
    """The share of even words: varies between samples and costs next to nothing."""
    words = response.split()
    return sum(word[-1] in "02468" for word in words) / max(len(words), 1)


def run_mega_rl(folder: Path) -> None:
    """Run one data-parallel rank of one thread."""
    import torch

    from mega_rl.config.loader import load
    from mega_rl.parallel.accelerator import prepare
    from mega_rl.parallel.comm import GroupRanks

    task = Task.read(folder)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    overrides = [
        f"model.path={folder / 'model'}",
        "model.dtype=fp32",
        f"data.train_files=[{folder / 'train.jsonl'}]",
        f"data.max_prompt_tokens={task.prompt_tokens}",
        f"rollout.n={task.samples}",
        f"rollout.max_new_tokens={task.new_tokens}",
        f"reward.function={Path(__file__)}:score",
        "algorithm.advantage=grpo",
        f"algorithm.kl={'loss' if task.kl_coef else 'none'}",
        *([f"algorithm.kl.coef={task.kl_coef}"] if task.kl_coef else []),
        f"optim.lr={LEARNING_RATE}",
        f"trainer.prompts_per_step={task.prompts}",
        f"trainer.minibatch_size={task.prompts}",
        f"trainer.microbatch.max_tokens={task.max_tokens}",
        "trainer.steps=1000",
        f"trainer.run_dir={folder / 'run'}",
        "metrics.tensorboard=false",
        "metrics.progress_bar=false",
        "metrics.rollout_interval=0",
    ]
    config = load(None, overrides)
    accelerator = prepare("cpu")
    from mega_rl.trainer.assemble import build_trainer, session

    with session(config, accelerator) as groups, ExitStack() as resources:
        trainer = build_trainer(config, accelerator, groups, stop_requested=lambda: False, resources=resources)
        trainer.stage.publish(trainer.sync)
        world = GroupRanks(groups.world)
        commands = Commands(folder / "mega_rl") if world.rank == 0 else None
        orders = iter(commands) if commands is not None else iter(())
        for step in range(1000):
            go = torch.tensor(int(next(orders, "") == "step"))
            if not int(world.broadcast(go)):
                break
            start = time.perf_counter()
            trainer.log.begin()
            trainer.step(step)
            metrics = trainer.log.metrics | trainer.log.timer.metrics()
            seconds = time.perf_counter() - start
            if commands is not None:
                phases = {name: value for name, value in metrics.items() if name.startswith("time/")}
                commands.answer({"seconds": seconds, "tokens": metrics["rollout/response_tokens"], "phases": phases})


def run_trl(folder: Path) -> None:
    """Run TRL's GRPOTrainer in one process."""
    import torch

    task = Task.read(folder)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    commands = Commands(folder / "trl")
    orders = iter(commands)
    tokens: list[int] = []

    def reward(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        tokens.append(sum(len(ids) for ids in completion_ids))
        return [score(p, c, "") for p, c in zip(prompts, completions, strict=True)]

    class OneStepAtATime(TrainerCallback):
        """Waits before each step and reports after it."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if next(orders, "") != "step":
                os._exit(0)
            tokens.clear()
            self.start = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            commands.answer({"seconds": time.perf_counter() - self.start, "tokens": float(sum(tokens))})

    arguments = GRPOConfig(
        output_dir=str(folder / "trl-run"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=task.trl_batch,
        gradient_accumulation_steps=task.prompts * task.samples // task.trl_batch,
        num_generations=task.samples,
        max_completion_length=task.new_tokens,
        beta=task.kl_coef,
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
