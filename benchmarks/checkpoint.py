"""Saving and loading a training state from two ranks (DP2): against plain writes, copies and torch's DCP.

The state is a Qwen3-shaped model of 0.16 billion parameters in bfloat16 with FP32 main parameters and Adam's moments,
random: 14 bytes per parameter, 2.2 GB. See README.md for the protocol and how to read it.

    make bench-checkpoint
    python benchmarks/checkpoint.py --tiny        # a small model, for a look at the program, not at the figures
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from converters import MODELS, TINY, write_source
from driver import TORCHRUN, Report, compare, parser_of, run

MODEL = {**MODELS["dense"], "num_hidden_layers": 8, "vocab_size": 32768}
# (ours, other) -> largest ratio
TARGETS = {("save", "write"): 1.2, ("load", "dcp.load"): 0.35, ("async", "save"): 0.1}
# Without a target: what a save in memory takes beside one on disk, in the background, and beside a plain copy.
SHOWN = (("memory", "save"), ("memory", "async"), ("memory", "copy"))
CHUNK = 4 << 20
SHM = "/dev/shm"
BYTES_PER_PARAMETER = 14  # bf16 weights, FP32 main parameters, two FP32 moments


def contenders(engine: Any, folder: Path, in_memory: Path) -> dict[str, Callable[[], float]]:
    """name -> does it once; returns the seconds of this rank that count."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from mega_rl.checkpoint.memory.hosts import Host
    from mega_rl.checkpoint.memory.store import MemoryCheckpoints
    from mega_rl.checkpoint.run_state import RunState
    from mega_rl.checkpoint.store import RunCheckpoints
    from mega_rl.config.schema import CheckpointConfig
    from mega_rl.config.schema.training import MemoryCheckpointConfig
    from mega_rl.parallel.comm import GroupRanks

    ranks, rank = GroupRanks(dist.group.WORLD), dist.get_rank()

    def store(name: str, *, background: bool = False, memory: int = 0) -> RunCheckpoints:
        in_memory = MemoryCheckpointConfig(memory)
        settings = CheckpointConfig(async_save=background, keep=1, on_error="stop", memory=in_memory)
        return RunCheckpoints(folder / name, RunState({"actor": engine}, {}, ranks, {}, "dp2", {}), settings)

    stores = {"save": store("save"), "async": store("async", background=True)}
    MemoryCheckpoints.host = staticmethod(lambda: Host("host", "host", in_memory))
    stores["memory"] = store("memory/checkpoints", memory=1)
    stores["memory"].lock()
    stores["memory"].move_earlier_run(folder / "memory")
    steps = dict.fromkeys(stores, 0)
    pieces = engine.state().pieces
    owned = [piece.data.detach().contiguous() for piece in pieces if piece.owned]
    mine = torch.cat([data.view(-1).view(torch.uint8) for data in owned])  # its own memory, in one piece
    read = torch.empty_like(mine)
    apart = {f"{rank}/{i}": data.clone() for i, data in enumerate(owned)}

    def timed(work: Callable[[], Any]) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    def write() -> None:
        """The same bytes, and no more, into a file of each rank; flushed."""
        path = folder / f"raw{rank}"
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        for start in range(0, len(mine), CHUNK):
            os.pwrite(descriptor, mine[start : start + CHUNK].numpy().data, start)
        os.fsync(descriptor)
        os.close(descriptor)

    def save(name: str) -> None:
        steps[name] += 1
        stores[name].save(steps[name], {})

    def save_async() -> float:
        stall = timed(lambda: save("async"))
        stores["async"].finish()
        return stall

    def save_in_memory() -> None:
        steps["memory"] += 1
        stores["memory"].save_in_memory(steps["memory"], {})

    def dcp_save() -> None:
        if rank == 0:
            shutil.rmtree(folder / "dcp", ignore_errors=True)
        dist.barrier()
        dcp.save(apart, checkpoint_id=folder / "dcp")

    return {
        "write": lambda: timed(write),
        "save": lambda: timed(lambda: save("save")),
        "async": save_async,
        "memory": lambda: timed(save_in_memory),
        "dcp.save": lambda: timed(dcp_save),
        "copy": lambda: timed(lambda: read.copy_(mine)),
        "load": lambda: timed(stores["save"].restore),
        "dcp.load": lambda: timed(lambda: dcp.load(apart, checkpoint_id=folder / "dcp")),
    }


def rank_main(arguments: argparse.Namespace) -> None:
    """One of the two ranks: every round each contender in turn; rank 0 writes what was results."""
    import torch

    rank, folder = int(os.environ["RANK"]), arguments.folder
    torch.set_num_threads(1)
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("cpu")
    import torch.distributed as dist

    from mega_rl.config.schema import Config, ModelConfig
    from mega_rl.trainer.assemble import build_actor, session

    config = Config(model=ModelConfig(path=str(folder / "model"), dtype="bf16"))
    with session(config, accelerator) as groups:
        engine = build_actor(config, groups, accelerator)
        generator = torch.Generator().manual_seed(rank)
        for piece in engine.state().pieces:
            if "/" in piece.name and not piece.name.startswith("weights/"):
                piece.data.normal_(generator=generator)
        parameters = sum(parameter.numel() for model in engine.models for parameter in model.parameters())
        runs = contenders(engine, folder, arguments.memory)
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(arguments.warmup + arguments.rounds):
            # A load needs a save before it; otherwise the order alternates.
            saving = [name for name in runs if not name.endswith("load") and name != "copy"]
            loading = [name for name in runs if name not in saving]
            for name in [*saving, *loading] if number % 2 else [*reversed(saving), *reversed(loading)]:
                dist.barrier()
                spent = torch.tensor(runs[name]())
                dist.all_reduce(spent, op=dist.ReduceOp.MAX)
                if number >= arguments.warmup:
                    seconds[name].append(float(spent))
        if rank == 0:
            newest = max((folder / "save").glob("step_*"))
            on_disk = sum(path.stat().st_size for path in newest.iterdir())
            results = {"seconds": seconds, "bytes": on_disk, "theory": parameters * BYTES_PER_PARAMETER}
            (folder / "results.json").write_text(json.dumps(results))


def report(results: dict[str, Any], outcome: Report) -> None:
    """Print a table."""
    seconds = results["seconds"]
    size = results["bytes"] / results["theory"]
    print(f"\n{results['bytes'] / 1e9:.2f} GB on disk, {size:.4f} of 14 bytes per parameter")
    if size > 1.01:
        outcome.missed.append(f"bytes on disk are {size:.4f} of theory, target 1.01")
    for name, spent in seconds.items():
        print(f"  {name:9} {1e3 * statistics.median(spent):8.1f} ms")
    for ours, other in (*TARGETS, *SHOWN, ("async", "copy"), ("load", "copy"), ("save", "dcp.save")):
        bound = TARGETS.get((ours, other))
        print("  " + outcome.add(compare(f"{ours} / {other}", seconds[ours], seconds[other], bound)))


def main() -> int:
    """Print the comparisons; the exit code is that of `Report.end`."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--memory", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder:
        rank_main(arguments)
        return 0
    outcome = Report(arguments)
    rounds, warmup = (2, 1) if arguments.tiny else (arguments.rounds, arguments.warmup)
    prefix = "bench_checkpoint_"
    with tempfile.TemporaryDirectory(prefix=prefix) as name, tempfile.TemporaryDirectory(prefix=prefix, dir=SHM) as shm:
        folder = Path(name)
        write_source(folder / "model", MODEL | (TINY if arguments.tiny else {}))
        own = [__file__, "--folder", name, "--memory", shm, "--rounds", str(rounds), "--warmup", str(warmup)]
        run([*TORCHRUN, "2", *own], deadline_s=3600)
        results = json.loads((folder / "results.json").read_text())
    report(results, outcome)
    return outcome.end(results)


if __name__ == "__main__":
    sys.exit(main())
