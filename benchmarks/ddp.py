"""Data parallelism against its peers: the FP32-summing reduce-scatter alone, and whole training steps.

    make bench-ddp                       # both parts, two ranks (the collective with four as well)
    python benchmarks/ddp.py --slowed    # the self-check: a build that is 20 % slower must be found out

Contenders live in the same processes, pinned to one core each, and take turns in alternating order, so that a drift of
the machine's speed meets all. A sample is the time of the slowest rank, a ratio that of two samples of one round; the
figure is the median ratio with a bootstrap interval, and a target holds for the upper end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from driver import TORCHRUN, Report, compare, parser_of, run

COLLECTIVE_TARGETS = {"mcore": 1 / 4, "all_reduce": 0.45}  # of 16 and 128 MiB between two ranks
STEP_TARGETS = {"ddp": 1.05, "zero": 0.85, "fsdp2": 0.5, "mcore": 0.7}
WARMUP = 3
WIDTH, INNER, TOKENS = 1024, 4096, 128
LEARNING_RATE = 1e-4
WEIGHT_DISTANCE = 1e-2  # of the distance travelled: Adam divides the smallest gradients by their own rounding errors
NORM_DISTANCE = 1e-3  # an fp32 norm of 4 M elements is off by some 1e-4, and the contenders cut their sums differently


@dataclass(frozen=True)
class Contender:
    """One way to do the work."""

    run: Callable[[], Any]
    bytes_sent: float  # that leave a rank each time


def measure(contenders: Mapping[str, Contender], rounds: int) -> dict[str, list[float]]:
    """Seconds of the slowest rank, by contender and round; `memcpy` is the machine's own speed in between."""
    import torch
    import torch.distributed as dist

    source = torch.ones(8 << 20)
    target = torch.empty_like(source)
    jobs = {"memcpy": Contender(lambda: target.copy_(source), 0.0), **contenders}
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(WARMUP + rounds):
        for name in list(jobs) if turn % 2 == 0 else reversed(jobs):
            dist.barrier()
            start = time.perf_counter()
            jobs[name].run()
            slowest = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if turn >= WARMUP:
                seconds[name].append(float(slowest))
    return seconds


# --- the collective alone


def collective(mebibytes: int, dtype_name: str, rounds: int, *, slowed: bool) -> dict[str, Any]:
    """Every contender reduces `mebibytes` of gradients to one shard per rank."""
    import torch
    import torch.distributed as dist
    from megatron.core.distributed.reduce_scatter_with_fp32_accumulation import reduce_scatter_with_fp32_accumulation

    from mega_rl.ddp.reduce_scatter import Scratch, reduce_scatter_fp32

    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    dtype = getattr(torch, dtype_name)
    numel = (mebibytes << 20) // dtype.itemsize
    shard = numel // ranks
    scratch = Scratch(numel * dtype.itemsize)
    gradients = torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)
    out = {name: gradients.new_empty(shard) for name in ("mega_rl", "mcore", "reduce_scatter")}
    whole = gradients.clone()
    sharded = numel * dtype.itemsize * (ranks - 1) / ranks

    def mega_rl() -> None:
        reduce_scatter_fp32(out["mega_rl"], gradients, group=group, scratch=scratch).wait()

    contenders = {
        "mega_rl": Contender(mega_rl, sharded),
        "all_reduce": Contender(lambda: dist.all_reduce(whole), 2 * sharded),
        "reduce_scatter": Contender(lambda: dist.reduce_scatter_tensor(out["reduce_scatter"], gradients), sharded),
    }
    if dtype == torch.bfloat16:
        contenders["mcore"] = Contender(
            lambda: reduce_scatter_with_fp32_accumulation(out["mcore"], gradients, dist.ReduceOp.SUM, group, False),
            sharded,
        )
    if slowed:
        contenders["slowed"] = slow_down(contenders["mega_rl"], rounds)
    seconds = measure(contenders, rounds)
    if dtype == torch.bfloat16:
        assert torch.equal(out["mega_rl"], out["mcore"]), "mega_rl and Megatron-Core disagree"
    if ranks == 2:  # one addition, rounded once by everybody
        assert torch.equal(out["mega_rl"], out["reduce_scatter"]), "mega_rl and gloo's reduce-scatter disagree"
    return {"seconds": seconds, "bytes": {name: job.bytes_sent for name, job in contenders.items()}}


def slow_down(contender: Contender, rounds: int) -> Contender:
    """The same with 20 % of its own time added."""
    times = measure({"this": contender}, max(3, rounds // 4))["this"]
    pause = 0.2 * statistics.median(times)

    def run() -> None:
        contender.run()
        time.sleep(pause)

    return Contender(run, contender.bytes_sent)


# --- whole steps


class Step:
    """A model, its optimizer, and one training step that returns the gradient norm before clipping."""

    def __init__(self, blocks: int) -> None:
        import torch

        torch.manual_seed(0)
        self.module: Any = torch.nn.Sequential(
            *(
                torch.nn.Sequential(
                    torch.nn.Linear(WIDTH, INNER, bias=False),
                    torch.nn.GELU(),
                    torch.nn.Linear(INNER, WIDTH, bias=False),
                )
                for _ in range(blocks)
            )
        )
        self.start = [parameter.detach().clone() for parameter in self.module.parameters()]
        self.norms: list[float] = []
        self.calls = 0

    def loss(self, model: Any, scale: int) -> Any:
        """Return the loss of this rank's tokens times `scale`, which turns averaged gradients into sums."""
        import torch
        import torch.distributed as dist

        generator = torch.Generator().manual_seed(1000 * self.calls + dist.get_rank())
        self.calls += 1
        return model(torch.randn(TOKENS, WIDTH, generator=generator)).square().mean() * scale

    def weights(self) -> list[Any]:
        """Whole parameters."""
        return [parameter.detach() for parameter in self.module.parameters()]


class TorchStep(Step):
    """Step of torch's DDP or FSDP2 with a fused AdamW, or with ZeRO's sharding of it."""

    def __init__(self, blocks: int, kind: str) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.optim import ZeroRedundancyOptimizer

        super().__init__(blocks)
        settings: dict[str, Any] = {"lr": LEARNING_RATE, "betas": (0.9, 0.95), "weight_decay": 0.0, "fused": True}
        if kind == "fsdp2":
            mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
            for block in self.module:
                fully_shard(block, mesh=mesh)
            self.model = fully_shard(self.module, mesh=mesh)
        else:
            self.model = torch.nn.parallel.DistributedDataParallel(self.module, gradient_as_bucket_view=True)
        if kind == "zero":
            self.optimizer: Any = ZeroRedundancyOptimizer(
                self.model.parameters(), optimizer_class=torch.optim.AdamW, **settings
            )
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), **settings)

    def run(self) -> None:
        """Run one training step."""
        import torch
        import torch.distributed as dist

        self.optimizer.zero_grad()
        self.loss(self.model, dist.get_world_size()).backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        self.optimizer.step()

    def weights(self) -> list[Any]:
        """Whole parameters."""
        full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in self.module.parameters()]
        return [parameter.detach() for parameter in full]


class MegatronStep(Step):
    """mega_rl's DDP and optimizer as its engine uses them, or Megatron-Core's as they are."""

    def __init__(self, blocks: int, groups: Any, *, ours: bool) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer import TransformerConfig

        from mega_rl.config.schema import MegatronOptimizerConfig, OptimConfig
        from mega_rl.config.schema.engine import DdpConfig
        from mega_rl.ddp.optimizer import build_optimizer
        from mega_rl.ddp.wrap import wrap_chunks

        super().__init__(blocks)
        collection = groups.collection
        config = TransformerConfig(
            num_layers=1, hidden_size=WIDTH, num_attention_heads=1, calculate_per_token_loss=True
        )
        if ours:
            optim = OptimConfig(lr=LEARNING_RATE)
            chunks: Any = [self.module]
            (self.model,) = wrap_chunks(
                chunks, config=config, ddp=DdpConfig(), distributed_optimizer=True, collection=collection
            )
            placement = MegatronOptimizerConfig()
            self.optimizer = build_optimizer(
                [self.model], optim=optim, placement=placement, bf16=False, collection=collection
            )
        else:
            ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
            self.model = DistributedDataParallel(config, ddp, self.module, pg_collection=collection)
            settings = OptimizerConfig(
                optimizer="adam",
                lr=LEARNING_RATE,
                weight_decay=0.0,
                adam_beta2=0.95,
                clip_grad=1.0,
                use_distributed_optimizer=True,
            )
            self.optimizer = get_megatron_optimizer(
                settings, [self.model], use_gloo_process_groups=False, pg_collection=collection
            )

    def run(self) -> None:
        """Run one training step."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.loss(self.model, 1).backward()
        self.model.finish_grad_sync()
        _, norm, _ = self.optimizer.step()
        self.norms.append(float(norm))


def steps(blocks: int, rounds: int, groups: Any, *, slowed: bool) -> dict[str, Any]:
    """Every contender trains the same weights on the same tokens."""
    import torch.distributed as dist

    ranks = dist.get_world_size()
    makers: dict[str, Callable[[], Any]] = {
        "mega_rl": lambda: MegatronStep(blocks, groups, ours=True),
        "mcore": lambda: MegatronStep(blocks, groups, ours=False),
        "ddp": lambda: TorchStep(blocks, "ddp"),
        "zero": lambda: TorchStep(blocks, "zero"),
        "fsdp2": lambda: TorchStep(blocks, "fsdp2"),
    }
    made = {name: make() for name, make in makers.items()}
    size = sum(parameter.numel() for parameter in made["mega_rl"].start) * 4 * (ranks - 1) / ranks
    passes = {"mega_rl": 2, "mcore": 2, "ddp": 2, "zero": 3, "fsdp2": 3}  # reduce-scatters and all-gathers
    contenders = {name: Contender(step.run, passes[name] * size) for name, step in made.items()}
    if slowed:
        contenders = {"mega_rl": contenders["mega_rl"], "slowed": slow_down(contenders["mega_rl"], rounds)}
    seconds = measure(contenders, rounds)
    if not slowed:
        compare_results(made)
    return {"seconds": seconds, "bytes": {name: job.bytes_sent for name, job in contenders.items()}}


def compare_results(made: Mapping[str, Any]) -> None:
    """Stop unless all contenders have had the same gradient norms and have moved to the same weights."""
    reference = made["mega_rl"]
    travelled = sum(float((w - s).square().sum()) for w, s in zip(reference.weights(), reference.start, strict=True))
    assert travelled > 0, "nothing was trained"
    for name, step in made.items():
        for own, other in zip(reference.norms, step.norms, strict=True):
            assert abs(own - other) <= NORM_DISTANCE * abs(own), f"{name}: gradient norm {other}, mega_rl {own}"
        apart = sum(float((w - o).square().sum()) for w, o in zip(reference.weights(), step.weights(), strict=True))
        assert apart <= WEIGHT_DISTANCE**2 * travelled, f"{name}: weights differ by {(apart / travelled) ** 0.5}"


# --- the driver


def rank_main(arguments: argparse.Namespace) -> None:
    """Run every measurement of this world size on one rank; rank 0 writes the results."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    import warnings

    import torch

    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("cpu")
    from mega_rl.parallel import groups
    from mega_rl.parallel.layout import ParallelLayout

    world = int(os.environ["WORLD_SIZE"])
    made = groups.initialize(ParallelLayout(world), accelerator=accelerator, timeout_s=300.0)
    results: dict[str, Any] = {}
    for mebibytes in arguments.sizes:
        for dtype in ("bfloat16", "float32"):
            results[f"{mebibytes} MiB {dtype}, {world} ranks"] = collective(
                mebibytes, dtype, arguments.rounds, slowed=arguments.slowed
            )
    if world == 2 and arguments.blocks:
        results["step"] = steps(arguments.blocks, arguments.rounds, made, slowed=arguments.slowed)
    if os.environ["RANK"] == "0":
        arguments.results.write_text(json.dumps(results))
    groups.destroy()


def launch(world: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run this file on `world` ranks; what rank 0 wrote."""
    with tempfile.TemporaryDirectory(prefix="bench_ddp_") as folder:
        results = Path(folder) / "results.json"
        forwarded = [f"--rounds={arguments.rounds}", f"--blocks={arguments.blocks}", f"--results={results}"]
        forwarded += ["--slowed"] if arguments.slowed else []
        sizes = ["--sizes", *map(str, arguments.sizes)]
        run([*TORCHRUN, str(world), __file__, *forwarded, *sizes], deadline_s=1800)
        return json.loads(results.read_text())


def report(name: str, result: Mapping[str, Any], outcome: Report, *, slowed: bool) -> None:
    """Print one comparison."""
    seconds, sent = result["seconds"], result["bytes"]
    print(name)
    bounds = STEP_TARGETS if name == "step" else COLLECTIVE_TARGETS
    gated = name == "step" or (name.endswith("2 ranks") and "bfloat16" in name and not name.startswith("1 MiB"))
    for other, times in seconds.items():
        line = f"  {other:15s} {1e3 * statistics.median(times):9.2f} ms  {sent.get(other, 0) / 2**20:8.1f} MiB sent"
        if other not in ("mega_rl", "memcpy"):
            bound = bounds.get(other) if gated else None
            figure = compare(f"{name}, mega_rl / {other}", seconds["mega_rl"], times, bound)
            line += f"  {outcome.add(figure)}"
            if slowed and other == "slowed" and figure.high >= 0.95:
                outcome.missed.append(f"{name}: the slowed build was not told apart")
        print(line)


def main() -> int:
    """Print the comparisons; the exit code is that of `Report.end`."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", type=int, nargs="*", default=[1, 16, 128], help="MiB of gradients")
    parser.add_argument("--blocks", type=int, default=6, help="8.4 M parameters each; 0 leaves the steps out")
    parser.add_argument("--worlds", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--slowed", action="store_true", help="only check that a slower build is found out")
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.results:
        rank_main(arguments)
        return 0
    outcome = Report(arguments)
    if arguments.tiny:
        arguments.rounds, arguments.sizes, arguments.blocks, arguments.worlds = 2, [1], 1, [2]
    merged: dict[str, Any] = {}
    for world in arguments.worlds:
        results = launch(world, arguments)
        merged |= results
        for name, result in results.items():
            report(name, result, outcome, slowed=arguments.slowed)
    copies = [second for result in merged.values() for second in result["seconds"]["memcpy"]]
    middle = statistics.quantiles(copies, n=10)
    drift = middle[-1] / middle[0] - 1
    print(f"a copy of 32 MiB took {1e3 * statistics.median(copies):.1f} ms; nine tenths within {100 * drift:.0f} %")
    return outcome.end(merged)


if __name__ == "__main__":
    sys.exit(main())
