"""Weights from two trainer ranks (TP2) into one server: buckets over a process group against the usual ways.

The model has Qwen3-0.6B's shape: 1.19 GB of bfloat16 in 310 tensors, random. The receiver is a process of its own: a
stand-in with SGLang's endpoints, or with --real a SGLang server on CPUs. See README.md.

    make bench-weight-sync
    python benchmarks/weight_sync.py --tiny       # a small model, for a look at the program, not at the figures
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from converters import MODELS, write_source
from driver import TORCHRUN, Contender, Report, compare, parser_of, run

TARGETS = {"per tensor": (1.0, "at most")}
OURS = "distributed"


def contenders(engine: Any, receiver: Any, bucket_mib: int) -> dict[str, Callable[[int], Any]]:
    """name -> sends all weights, as the version it is given; collective, returns failures or None."""
    import torch
    import torch.distributed as dist

    from mega_rl.rollout.sglang.weights.process_group import DistributedTransport
    from mega_rl.rollout.sglang.weights.transport import Server, TrainerWeights

    rank = dist.get_rank()
    weights = TrainerWeights(engine, torch.bfloat16)
    servers = [Server(0, 1, (0,), receiver if rank == 0 else None)]
    group = DistributedTransport(weights, servers, bucket_bytes=bucket_mib << 20, timeout_s=120.0)
    source = torch.empty(sum(bucket.nbytes for bucket in weights.buckets(1 << 30)), dtype=torch.uint8).fill_(1)
    target = torch.empty_like(source)

    chunk = bucket_mib << 20
    descriptor = os.memfd_create("floor")
    os.ftruncate(descriptor, chunk)
    middle = torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=chunk, dtype=torch.uint8)

    def copy(version: int) -> None:
        if rank == 0:
            target.copy_(source)

    def copy_twice(version: int) -> None:
        """Copy into shared memory and out of it, mapped for each bucket as SGLang's unpickling does: the least work."""
        if rank == 0:
            for part, place in zip(source.split(chunk), target.split(chunk), strict=True):
                middle[: len(part)].copy_(part)
                mapped = torch.from_file(f"/proc/self/fd/{descriptor}", size=len(part), dtype=torch.uint8)
                place.copy_(mapped)

    def per_tensor(version: int) -> None:
        """A request for each tensor, which travels through shared memory under a name: torch's own way."""
        from multiprocessing.reduction import ForkingPickler

        import torch.multiprocessing

        torch.multiprocessing.set_sharing_strategy("file_system")
        for name, tensor in weights.export(bucket_bytes=bucket_mib << 20):
            if rank == 0:
                buffer = io.BytesIO()
                ForkingPickler(buffer).dump([(name, tensor)])
                receiver.update_from_tensor([base64.b64encode(buffer.getvalue()).decode()], version=version)

    return {
        "copy": copy,
        "two copies": copy_twice,
        OURS: lambda version: group.send(version=version),
        "per tensor": per_tensor,
    }


def rank_main(arguments: argparse.Namespace) -> None:
    """One of the two trainer ranks: every round each contender in turn; rank 0 writes the results."""
    import torch

    rank, folder = int(os.environ["RANK"]), arguments.folder
    if not arguments.real:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % os.cpu_count()]})  # type: ignore[operator]
    torch.set_num_threads(1)
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("cpu")
    import torch.distributed as dist

    from mega_rl.config.schema import Config, EngineConfig, MegatronConfig, ModelConfig
    from mega_rl.rollout.sglang.control import Control, Endpoint, Keys
    from mega_rl.rollout.sglang.weights.transport import TrainerWeights
    from mega_rl.trainer.assemble import build_actor, session

    address = json.loads((folder / "endpoint.json").read_text())
    control = Control(Endpoint(0, address["url"], Keys(address["api_key"], address["admin_key"])), timeout_s=120.0)
    config = Config(
        engine=EngineConfig(megatron=MegatronConfig(tp=2)),
        model=ModelConfig(path=str(folder / "model"), dtype="bf16"),
    )
    with session(config, accelerator) as groups:
        engine = build_actor(config, groups, accelerator, trainable=False)
        runs = contenders(engine, control, arguments.bucket_mib)
        wanted = expected_digest(engine) if not arguments.real else ""
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        requests: dict[str, list[int]] = {name: [] for name in runs}
        buckets = len(TrainerWeights(engine, torch.bfloat16).buckets(arguments.bucket_mib << 20))
        for number in range(arguments.warmup + arguments.rounds):
            for name in list(runs) if number % 2 else list(reversed(runs)):
                if rank == 0 and not arguments.real:
                    ask(control, "/zero")
                before = control.requests
                dist.barrier()
                start = time.perf_counter()
                failed = runs[name](number + 1)
                spent = torch.tensor(time.perf_counter() - start)
                dist.all_reduce(spent, op=dist.ReduceOp.MAX)
                sent = control.requests - before
                if rank == 0 and not name.endswith(("copy", "copies")):
                    check(control, name, wanted, version=number + 1, real=arguments.real)
                assert not failed, failed
                if number >= arguments.warmup:
                    seconds[name].append(float(spent))
                    requests[name].append(sent)
        size = sum(tensor.nbytes for _, tensor in engine.export_weights())
        if rank == 0:
            results = {"seconds": seconds, "requests": requests, "bytes": size, "buckets": buckets}
            (folder / "results.json").write_text(json.dumps(results))


def ask(control: Any, path: str) -> Any:
    """Call one of the stand-in's own endpoints."""
    return control._api.json("POST", path, {})


def check(control: Any, name: str, wanted: str, *, version: int, real: bool) -> None:
    """Assert that the receiver holds the trainer's weights; of a real server, that it has their version."""
    if real:
        held = control.version()
        assert held == str(version), f"{name}: the server says version {held}, not {version}"
    else:
        held = ask(control, "/digest")["digest"]
        assert held == wanted, f"{name}: the receiver holds other weights"


def expected_digest(engine: Any) -> str:
    """Return the digest of the trainer's weights, gathered by the exporter."""
    from weight_receiver import digest

    return digest(dict(engine.export_weights()))


@contextlib.contextmanager
def stand_in(folder: Path) -> Iterator[dict[str, str]]:
    """The receiver's address."""
    command = [str(Path(__file__).with_name("weight_receiver.py")), str(folder / "model"), str(folder / "stand-in")]
    with Contender("the stand-in", folder / "stand-in", command) as receiver:
        port = receiver.answer(120.0)["port"]
        yield {"url": f"http://127.0.0.1:{port}", "api_key": "none", "admin_key": "none"}


@contextlib.contextmanager
def real_server(folder: Path) -> Iterator[dict[str, str]]:
    """A SGLang server of the same model in bfloat16, paused, as it is during an update."""
    from mega_rl.rollout.sglang.control import Control
    from mega_rl.rollout.sglang.server.process import ServerProcess, ServerSettings

    settings = ServerSettings(
        model_path=folder / "model",
        tp=1,
        dtype="bfloat16",
        device="cpu",
        args={"max_total_tokens": 4096},
        start_timeout_s=300.0,
    )
    with ServerProcess(settings, index=0, folder=folder) as server:
        endpoint = server.wait_ready()
        control = Control(endpoint, timeout_s=60.0)
        control.call("POST", "/pause_generation", {"mode": "abort"})
        control.flush()
        yield {"url": endpoint.url, "api_key": endpoint.keys.api_key, "admin_key": endpoint.keys.admin_key}


def measure(arguments: argparse.Namespace, *, real: bool, rounds: int) -> dict[str, Any]:
    """Seconds and requests of every contender and round."""
    with tempfile.TemporaryDirectory(prefix="bench_weights_") as name:
        folder = Path(name)
        config = MODELS["dense"]
        if arguments.tiny:
            config = {**config, "num_hidden_layers": 2, "hidden_size": 256, "vocab_size": 4096}
        write_source(folder / "model", config)
        with real_server(folder) if real else stand_in(folder) as address:
            path = folder / "endpoint.json"
            path.touch(mode=0o600)
            path.write_text(json.dumps(address))
            own = [__file__, "--folder", str(folder), "--rounds", str(rounds), "--warmup", str(arguments.warmup)]
            own += ["--bucket-mib", str(arguments.bucket_mib), *(["--real"] if real else [])]
            run([*TORCHRUN, "2", *own], deadline_s=1800)
            results: dict[str, Any] = json.loads((folder / "results.json").read_text())
            return results


def report(title: str, results: dict[str, Any], outcome: Report, *, judged: bool) -> None:
    """Print a table."""
    seconds = results["seconds"]
    print(f"\n{title}: {results['bytes'] / 1e9:.2f} GB, {results['buckets']} buckets, {len(seconds[OURS])} rounds")
    for name, spent in seconds.items():
        requests = statistics.median(results["requests"][name])
        line = f"  {name:14} {1e3 * statistics.median(spent):8.1f} ms  {requests:5} requests"
        if name != OURS:
            bound, _ = TARGETS.get(name, (None, ""))
            figure = compare(f"{title}, {OURS} / {name}", seconds[OURS], spent, bound if judged else None)
            line += f"   {outcome.add(figure)}"
        print(line)
    for count in results["requests"][OURS]:
        if count != results["buckets"]:
            outcome.wrong.append(f"{title}: {count} requests for {results['buckets']} buckets")


def main() -> int:
    """Print the comparisons; the exit code is that of `Report.end`."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--bucket-mib", type=int, default=128)
    parser.add_argument("--real", action="store_true", help="a SGLang server too, in a third of the rounds")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder:
        rank_main(arguments)
        return 0
    outcome = Report(arguments)
    if arguments.tiny:
        arguments.rounds, arguments.warmup, arguments.bucket_mib = 2, 1, 4
    results = {"stand-in": measure(arguments, real=False, rounds=arguments.rounds)}
    report("stand-in", results["stand-in"], outcome, judged=True)
    if arguments.real:
        results["SGLang"] = measure(arguments, real=True, rounds=max(3, arguments.rounds // 3))
        report("SGLang", results["SGLang"], outcome, judged=False)
    return outcome.end(results)


if __name__ == "__main__":
    sys.exit(main())
