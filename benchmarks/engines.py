"""Training steps of both engines against Hugging Face's model under torch's DDP, padded and packed.

    make bench-engines                       # some 12 minutes on two idle cores
    python benchmarks/engines.py --slowed    # the self-check: a build that is 20 % slower must be found out

One Qwen3-shaped model (4 layers, width 512, vocabulary 32768, tied, fp32, 29 M parameters) trains on rows of lognormal
length, capped at 512 tokens, on two data-parallel ranks of one thread: forward, policy loss, backward, reduction,
clipping, Adam. Contenders live in the same processes and take turns in alternating order; a sample is the time of the
slowest rank, a ratio that of two samples of one round. Memory is measured in fresh processes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ddp import Contender, measure, slow_down
from driver import TORCHRUN, Figure, Report, bootstrap, parser_of, run

MODEL: dict[str, Any] = {
    "vocab_size": 32768,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
SAMPLE, MEDIAN, SIGMA, LONGEST = 512, 64, 0.85, 512  # rows of the sample, and their lengths in tokens
PROMPT_SHARE = 4  # a row's first quarter is prompt
BATCH = 4  # rows of a padded micro-batch
BUDGET = 1024  # tokens of a packed one
LEARNING_RATE = 1e-5
NORM_DISTANCE = 1e-3  # relative, between contenders, of every step's gradient norm
WEIGHT_DISTANCE = 1e-2  # of the distance travelled: Adam divides the smallest gradients by their own rounding errors

IMPLEMENTATIONS = ("hf", "megatron", "fsdp")
LAYOUTS = ("padded", "packed")
UNPACKED_TARGET = 1.10  # of Hugging Face's time per token, padding counted
PACKED_TARGET = 0.9  # of what leaving the padding out can give
FILL_TARGET = 0.99
TINY = {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 16}
HEADS = ("head", "plain head")
HEAD_TARGETS = {"time": 1.15, "peak": 0.25}  # of log_softmax's
SHARE_TARGET = 0.55  # of the bytes that DDP holds between steps: two ranks share them


# --- the work


def row_lengths() -> list[int]:
    """Tokens of each row of the sample."""
    import torch

    drawn = torch.randn(SAMPLE, generator=torch.Generator().manual_seed(0))
    lengths: list[int] = (math.log(MEDIAN) + SIGMA * drawn).exp().round().clamp(8, LONGEST).long().tolist()
    return lengths


def own_rows(rows: int, *, rank: int, ranks: int) -> Any:
    """This rank's share of the sample's first rows, in their order: an Experience with random tokens and advantages."""
    import torch

    from mega_rl.data.minibatches import partition_balanced
    from mega_rl.types import Experience, response_mask

    lengths = torch.tensor(row_lengths()[:rows])
    width = int(lengths.max())
    generator = torch.Generator().manual_seed(1)
    prompts = (lengths // PROMPT_SHARE).clamp(min=1)
    mask = response_mask(prompts, lengths, width=width)
    noise = 0.05 * torch.randn(rows, width, generator=generator)
    logprobs = (noise - math.log(MODEL["vocab_size"])) * mask  # about what random weights say
    advantages = torch.randn(rows, 1, generator=generator) * mask
    tokens = torch.randint(2, MODEL["vocab_size"], (rows, width), generator=generator)
    weights = mask.float() / mask.sum()
    everything = Experience.from_rows(
        tokens * (torch.arange(width) < lengths[:, None]),
        prompt_lengths=prompts,
        lengths=lengths,
        rollout_logprobs=logprobs,
        old_logprobs=logprobs,
        ref_logprobs=logprobs,
        advantages=advantages,
        loss_weights=weights,
        token_weights=weights,
    )
    share = partition_balanced(lengths.tolist(), ranks, equal_counts=True)[rank]
    return everything[torch.tensor(share)]


def batching_of(layout: str) -> Any:
    """Return mega_rl's batching: padded micro-batches of rows of similar length, or packed ones."""
    from mega_rl.engines.microbatches import Batching

    return Batching(packing=layout == "packed", max_tokens=BUDGET, micro_batch_size=BATCH)


def policy_loss() -> Any:
    """The clipped policy objective, the same for all."""
    from mega_rl.algorithms.kl import k3
    from mega_rl.algorithms.policy_losses import PPO
    from mega_rl.workers.models import PolicyLoss

    return PolicyLoss(PPO(dual_clip=0.0), kl=None, kl_estimator=k3)


class HuggingFaceStep:
    """transformers' model under torch's DDP with fused AdamW; log-probs by log_softmax over the full logits.

    Padded: rows in the order they come in. Packed: mega_rl's plan, the sequences told apart by their position ids.
    It computes no entropy, which both engines do.
    """

    def __init__(self, checkpoint: Path, batch: Any) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        from mega_rl.data.packing import pad
        from mega_rl.engines.microbatches import microbatch_loss, token_fields
        from mega_rl.parallel.comm import GroupRanks

        disable_progress_bar()
        self.module = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
        )
        self.model = torch.nn.parallel.DistributedDataParallel(self.module, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.loss = microbatch_loss(policy_loss(), batch)
        world = torch.distributed.group.WORLD
        self.ranks = GroupRanks(world)
        rows, names = range(len(batch.tokens)), token_fields(batch)
        in_order = [rows[first : first + BATCH] for first in range(0, len(rows), BATCH)]
        self.micros = {
            "padded": [pad(batch, chosen, field_names=names) for chosen in in_order],
            "packed": batching_of("packed").split(batch, data_parallel=self.ranks),
        }

    def step(self, layout: str) -> float:
        """One optimizer step; the gradient norm before clipping."""
        import torch

        micros = self.micros[layout]
        self.optimizer.zero_grad()
        for number, micro in enumerate(micros):
            self.model.require_backward_grad_sync = number == len(micros) - 1
            # DDP averages over ranks what is a sum.
            (self._loss(micro) * self.ranks.size).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return float(norm)

    def _loss(self, micro: Any) -> Any:
        from mega_rl.types import TokenOutputs

        logits = self.model(micro.tokens, position_ids=micro.position_ids, use_cache=False).logits
        logprobs = logits.log_softmax(-1).gather(-1, micro.targets.unsqueeze(-1)).squeeze(-1)
        return self.loss(TokenOutputs(logprobs=logprobs, entropy=logprobs.detach()), micro.fields).loss

    def weights(self) -> dict[str, Any]:
        """Return the weights by Hugging Face's names."""
        return {name: parameter.detach() for name, parameter in self.module.named_parameters()}

    def held(self) -> Iterator[Any]:
        """Tensors that stay between steps: weights, gradients, moments."""
        for parameter in self.model.parameters():
            yield parameter
            yield parameter.grad
            yield from (self.optimizer.state[parameter][moment] for moment in ("exp_avg", "exp_avg_sq"))


class EngineStep:
    """One of mega_rl's engines, as a run builds it."""

    def __init__(self, name: str, checkpoint: Path, batch: Any, groups: Any, accelerator: Any) -> None:
        from mega_rl.config.schema import (
            Config,
            EngineConfig,
            MicrobatchConfig,
            ModelConfig,
            OptimConfig,
            TrainerConfig,
        )
        from mega_rl.trainer.assemble import build_actor

        config = Config(
            engine=EngineConfig(backend=name),
            model=ModelConfig(path=str(checkpoint), dtype="fp32"),
            optim=OptimConfig(lr=LEARNING_RATE),
            trainer=TrainerConfig(microbatch=MicrobatchConfig(max_tokens=BUDGET, size=BATCH)),
        )
        self.engine: Any = build_actor(config, groups, accelerator)
        self.batch, self.loss = batch, policy_loss()
        self.micros = {
            layout: batching_of(layout).split(batch, data_parallel=self.engine.data_parallel) for layout in LAYOUTS
        }

    def step(self, layout: str) -> float:
        """One optimizer step; the gradient norm before clipping."""
        self.engine.batching = batching_of(layout)
        norm: float = self.engine.train_minibatch(self.batch, self.loss, lr=LEARNING_RATE)["grad_norm"]
        return norm

    def weights(self) -> dict[str, Any]:
        """Return the weights by Hugging Face's names; collective."""
        return {name: tensor.detach().clone() for name, tensor in self.engine.export_weights()}

    def held(self) -> Iterator[Any]:
        """Tensors that stay between steps: weights, gradients, main parameters, moments."""
        from mega_rl.ddp.access import gradient_tensors, optimizer_tensors, parameter_tensors
        from mega_rl.ddp.optimizer import torch_optimizers
        from mega_rl.engines.megatron import MegatronEngine

        chunks = self.engine.chunks if isinstance(self.engine, MegatronEngine) else [self.engine.model]
        yield from parameter_tensors(chunks)
        yield from gradient_tensors(chunks)
        inner = [self.engine.optimizer]
        if isinstance(self.engine, MegatronEngine):
            inner = torch_optimizers(self.engine.optimizer)
        for optimizer in inner:
            yield from optimizer_tensors(optimizer)


def make(name: str, checkpoint: Path, batch: Any, groups: Any, accelerator: Any) -> HuggingFaceStep | EngineStep:
    """The model of an implementation, ready to train."""
    if name == "hf":
        return HuggingFaceStep(checkpoint, batch)
    return EngineStep(name, checkpoint, batch, groups, accelerator)


class HeadStep:
    """Log-probs and entropies of `BUDGET` tokens from their hidden states, forward and backward."""

    def __init__(self, *, plain: bool) -> None:
        import torch

        generator = torch.Generator().manual_seed(0)
        vocab, width = MODEL["vocab_size"], MODEL["hidden_size"]
        self.plain = plain
        self.hidden = torch.randn(BUDGET, width, generator=generator).requires_grad_()
        self.weight = (0.02 * torch.randn(vocab, width, generator=generator)).requires_grad_()
        self.targets = torch.randint(vocab, (BUDGET,), generator=generator)
        self.outputs: dict[str, Any] = {}

    def run(self) -> None:
        """One forward and backward."""
        from mega_rl.parallel.vocab import vocab_parallel_logprobs_entropy

        self.hidden.grad = self.weight.grad = None
        self.outputs.clear()  # it holds the gradients of the step before
        logits = self.hidden @ self.weight.t()
        if self.plain:
            full = logits.log_softmax(-1)
            logprobs = full.gather(-1, self.targets.unsqueeze(-1)).squeeze(-1)
            entropy = -(full.exp() * full).sum(-1)
        else:
            logprobs, entropy = vocab_parallel_logprobs_entropy(logits, self.targets, group=None)
        (logprobs.mean() + 0.01 * entropy.mean()).backward()
        self.outputs = {"logprobs": logprobs.detach(), "entropy": entropy.detach(), "hidden": self.hidden.grad}
        self.outputs["weight"] = self.weight.grad

    def held(self) -> Iterator[Any]:
        """Tensors that stay: inputs, the matrix, and their gradients."""
        yield from (self.hidden, self.weight, self.hidden.grad, self.weight.grad)


# --- time


def timed(arguments: argparse.Namespace, groups: Any, accelerator: Any) -> dict[str, Any]:
    """Seconds of every contender, and the tokens that each computes on all ranks."""
    import torch

    from mega_rl.parallel.comm import GroupRanks

    world = GroupRanks(groups.world)
    batch = own_rows(arguments.rows, rank=world.rank, ranks=world.size)
    chosen = ("fsdp",) if arguments.slowed else IMPLEMENTATIONS
    made = {name: make(name, arguments.checkpoint, batch, groups, accelerator) for name in chosen}
    start = {name: tensor.clone() for name, tensor in next(iter(made.values())).weights().items()}
    norms: dict[str, list[float]] = {name: [] for name in made}

    def contender(name: str, layout: str) -> Contender:
        return Contender(lambda: norms[name].append(made[name].step(layout)), 0.0)

    contenders = {f"{name} {layout}": contender(name, layout) for name in made for layout in LAYOUTS}
    if arguments.slowed:
        packed = contenders["fsdp packed"]
        contenders = {"fsdp packed": packed, "slowed": slow_down(packed, arguments.rounds)}
    else:
        heads = {name: HeadStep(plain=name == "plain head") for name in HEADS}
        contenders |= {name: Contender(head.run, 0.0) for name, head in heads.items()}
    seconds = measure(contenders, arguments.rounds)
    if not arguments.slowed:
        compare_steps(made, norms, start)
        compare_heads(*(heads[name].outputs for name in HEADS))
    computed = {
        f"{name} {layout}": int(world.sum(torch.tensor(sum(micro.tokens.numel() for micro in micros))))
        for name, step in made.items()
        for layout, micros in step.micros.items()
    }
    return {"seconds": seconds, "computed": computed, "real": sum(row_lengths()[: arguments.rows])}


def compare_steps(made: Mapping[str, Any], norms: Mapping[str, list[float]], start: Mapping[str, Any]) -> None:
    """Stop unless all have had the same gradient norms and have moved to the same weights; collective."""
    reference = made["hf"].weights()
    travelled = sum(float((reference[name] - tensor).square().sum()) for name, tensor in start.items())
    assert travelled > 0, "nothing was trained"
    for name, step in made.items():
        for expected, actual in zip(norms["hf"], norms[name], strict=True):
            assert abs(actual - expected) <= NORM_DISTANCE * expected, f"{name}: gradient norm {actual}, hf {expected}"
        weights = step.weights()
        assert weights.keys() == reference.keys(), f"{name}: {sorted(weights.keys() ^ reference.keys())}"
        apart = sum(float((weights[key] - tensor).square().sum()) for key, tensor in reference.items())
        assert apart <= WEIGHT_DISTANCE**2 * travelled, f"{name}: weights differ by {(apart / travelled) ** 0.5}"


def compare_heads(ours: Mapping[str, Any], plain: Mapping[str, Any]) -> None:
    """Stop unless both heads give the same numbers and gradients, to 1e-5 of their norm."""
    for name, expected in plain.items():
        apart = float((ours[name] - expected).norm() / expected.norm())
        assert apart <= 1e-5, f"{name} of the heads differ by {apart}"


# --- memory


def memory_of(name: str, arguments: argparse.Namespace, groups: Any, accelerator: Any) -> dict[str, int]:
    """Bytes that a rank of one contender holds between two steps, and the most that it took; the largest of all ranks.

    The process has run nothing else.
    """
    import torch

    from mega_rl.parallel.comm import GroupRanks

    world = GroupRanks(groups.world)
    before = process_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts from here
    if name in HEADS:
        head = HeadStep(plain=name == "plain head")
        run, held = head.run, head.held
    else:
        implementation, layout = name.split()
        batch = own_rows(arguments.rows, rank=world.rank, ranks=world.size)
        step = make(implementation, arguments.checkpoint, batch, groups, accelerator)
        run, held = (lambda: step.step(layout)), step.held
    for _ in range(2):
        run()
    peak = process_bytes("VmHWM") - before
    sizes = torch.tensor([storage_bytes(held()), peak])
    return dict(zip(("held", "peak"), world.max(sizes).tolist(), strict=True))


def process_bytes(field: str) -> int:
    """A line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def storage_bytes(tensors: Iterator[Any]) -> int:
    """Memory of the tensors on this rank, counted once where they share it."""
    storages = {}
    for tensor in tensors:
        local = tensor.detach()
        local = local.to_local() if hasattr(local, "to_local") else local
        storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(storages.values())


# --- the driver


def rank_main(arguments: argparse.Namespace) -> None:
    """Run the measurements of one rank; rank 0 writes the results."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    import logging
    import warnings

    import torch

    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("cpu")
    from mega_rl.parallel import groups
    from mega_rl.parallel.layout import ParallelLayout

    world = ParallelLayout(int(os.environ["WORLD_SIZE"]))
    made = groups.initialize(world, accelerator=accelerator, timeout_s=300.0)
    groups.seed_model_parallel(0, made)
    if arguments.memory_of:
        result: dict[str, Any] = memory_of(arguments.memory_of, arguments, made, accelerator)
    else:
        result = timed(arguments, made, accelerator)
    if os.environ["RANK"] == "0":
        arguments.results.write_text(json.dumps(result))
    groups.destroy()


def launch(checkpoint: Path, arguments: argparse.Namespace, *, memory_of: str = "") -> dict[str, Any]:
    """Run this file on two ranks; what rank 0 wrote."""
    results = checkpoint / "results.json"
    forwarded = [f"--rounds={arguments.rounds}", f"--rows={arguments.rows}", f"--checkpoint={checkpoint}"]
    forwarded += [f"--results={results}", f"--memory-of={memory_of}"]
    forwarded += [f"--{name}" for name in ("slowed", "tiny") if getattr(arguments, name)]
    # Tensors that are freed leave the process at once.
    variables = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16)} if memory_of else {}
    run([*TORCHRUN, "2", __file__, *forwarded], deadline_s=1800, **variables)
    measured: dict[str, Any] = json.loads(results.read_text())
    return measured


def write_checkpoint(folder: Path) -> None:
    """The model with random weights."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**MODEL, bos_token_id=None, eos_token_id=None)).save_pretrained(folder)


def fill() -> float:
    """The share of real tokens in packed micro-batches of the whole sample."""
    from mega_rl.data.minibatches import plan_microbatches

    lengths = row_lengths()
    return sum(lengths) / (LONGEST * len(plan_microbatches(lengths, max_tokens=LONGEST)))


def report_time(result: Mapping[str, Any], outcome: Report, *, slowed: bool) -> None:
    """Print times and ratios."""
    seconds, computed, real = result["seconds"], result["computed"], result["real"]
    for name, times in seconds.items():
        note = f"  {computed[name]:6d} tokens computed for {real}" if name in computed else ""
        print(f"  {name:16s} {1e3 * statistics.median(times):9.1f} ms{note}")

    def paired(name: str, other: str, factor: float = 1.0) -> list[float]:
        return [factor * a / b for a, b in zip(seconds[name], seconds[other], strict=True)]

    if slowed:
        ratios = paired("fsdp packed", "slowed")
        print(outcome.add(Figure("fsdp packed / slowed", statistics.median(ratios), *bootstrap(ratios), 0.95)))
        return
    waste = computed["hf padded"] / real
    print(f"padding makes {waste:.2f} tokens of one in Hugging Face's padded micro-batches of {BATCH} rows")
    comparisons: list[tuple[str, list[float], float | None]] = []
    for engine in IMPLEMENTATIONS[1:]:
        per_token = computed["hf padded"] / computed[f"{engine} padded"]
        comparisons += [
            (
                f"{engine} padded / hf padded, per token computed",
                paired(f"{engine} padded", "hf padded", per_token),
                UNPACKED_TARGET,
            ),
            (f"{engine} padded / hf padded", paired(f"{engine} padded", "hf padded"), None),
            (
                f"{engine} packed / hf padded",
                paired(f"{engine} packed", "hf padded"),
                1 / (PACKED_TARGET * waste),
            ),
            (f"{engine} packed / hf packed", paired(f"{engine} packed", "hf packed"), None),
        ]
    comparisons += [
        ("fsdp packed / megatron packed", paired("fsdp packed", "megatron packed"), None),
        ("head / plain head", paired("head", "plain head"), HEAD_TARGETS["time"]),
    ]
    for label, ratios, bound in comparisons:
        print(outcome.add(Figure(label, statistics.median(ratios), *bootstrap(ratios), bound)))
    filled = fill()
    print(f"packed micro-batches of {LONGEST} tokens hold {filled:.4f} of them, target {FILL_TARGET}")
    if filled < FILL_TARGET:
        outcome.missed.append(f"the plan's micro-batches hold {filled:.4f} of their tokens")


def report_memory(results: Mapping[str, Mapping[str, int]], outcome: Report) -> dict[str, float]:
    """Print bytes per rank; returns them in MiB, and the shares that have a target."""
    print("memory of a rank, MiB: held between steps, and at most")
    for name, taken in results.items():
        print(f"  {name:16s} {taken['held'] / 2**20:8.0f} {taken['peak'] / 2**20:8.0f}")
    share = results["fsdp packed"]["held"] / results["hf packed"]["held"]
    # Beyond what stays: the logits and what is made of them.
    extra = {name: results[name]["peak"] - results[name]["held"] for name in HEADS}
    heads = extra["head"] / extra["plain head"]
    print(f"fsdp holds {share:.3f} of what DDP holds, target {SHARE_TARGET}")
    print(f"head / plain head, beyond what they hold: {heads:.3f}, target {HEAD_TARGETS['peak']}")
    for name, value, bound in (
        ("what fsdp holds", share, SHARE_TARGET),
        ("the head's memory", heads, HEAD_TARGETS["peak"]),
    ):
        if value > bound:
            outcome.missed.append(f"{name}: {value:.3f}, target {bound}")
    own = {f"{name}: MiB {key}": taken[key] / 2**20 for name, taken in results.items() for key in ("held", "peak")}
    return {"fsdp holds / DDP holds": share, "head's memory / log_softmax's": heads, **own}


def main() -> int:
    """Print the comparisons; the exit code is that of `Report.end`."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", type=int, default=32, help="of the sample, over both ranks")
    parser.add_argument("--no-memory", action="store_true", help="leave the measurement of memory out")
    parser.add_argument("--slowed", action="store_true", help="only check that a slower build is found out")
    for hidden in ("--checkpoint", "--results"):
        parser.add_argument(hidden, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--memory-of", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.tiny:
        MODEL.update(TINY)
    if arguments.results:
        rank_main(arguments)
        return 0
    outcome = Report(arguments)
    if arguments.tiny:
        arguments.rounds, arguments.rows, arguments.no_memory = 2, 4, True
    with tempfile.TemporaryDirectory(prefix="bench_engines_") as name:
        checkpoint = Path(name)
        write_checkpoint(checkpoint)
        results: dict[str, Any] = {"time": launch(checkpoint, arguments)}
        report_time(results["time"], outcome, slowed=arguments.slowed)
        numbers: dict[str, float] = {}
        if not (arguments.slowed or arguments.no_memory):
            names = [f"{name} {layout}" for name in IMPLEMENTATIONS for layout in LAYOUTS] + list(HEADS)
            results["memory"] = {name: launch(checkpoint, arguments, memory_of=name) for name in names}
            numbers = report_memory(results["memory"], outcome)
    return outcome.end(results, numbers=numbers)


if __name__ == "__main__":
    sys.exit(main())
