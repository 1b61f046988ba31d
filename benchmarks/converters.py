"""Loading, exporting and importing checkpoints: mega_rl against plain copies, safetensors, transformers and mbridge.

Two checkpoints of random bfloat16 weights are made on the spot: Qwen3-0.6B's shape (1.2 GB in 3 shards) and a mixture
of 16 experts (0.7 GB). Every contender is a process (two for TP2) that stays alive and does one operation at
each command; in every round each takes its turn, in alternating order. README.md has the protocol.

    make bench-converters
    python benchmarks/converters.py --tiny         # small checkpoints, for a look at the program, not at the figures
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import driver
from driver import Commands, Report, alternating, compare, own_bytes, parser_of

MIB = 1 << 20
START_S, OPERATION_S = 300.0, 300.0  # deadlines
COMMON: dict[str, Any] = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": COMMON
    | {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 28,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "moe": COMMON
    | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": 8,
        "intermediate_size": 3072,
        "moe_intermediate_size": 768,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 32768,
        "tie_word_embeddings": False,
    },
}
TINY = {"num_hidden_layers": 2, "vocab_size": 4096}


# What runs inside a contender.


def write_source(folder: Path, config: dict[str, Any], *, num_shards: int = 3) -> None:
    """A checkpoint of random weights, as the safetensors library writes one."""
    import torch
    from safetensors.torch import save_file

    from mega_rl.converters.hf.config import read_hf_config
    from mega_rl.converters.plan.parameters import hf_tensors

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.empty(tensor.shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
        for name, tensor in hf_tensors(read_hf_config(folder), head="lm").items()
    }
    limit = sum(t.nbytes for t in tensors.values()) / num_shards
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in tensors.items():
        if sum(t.nbytes for t in shards[-1].values()) >= limit:
            shards.append({})
        shards[-1][name] = tensor
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for file, shard in zip(names, shards, strict=True):
        save_file(shard, folder / file, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
        "weight_map": {name: file for file, shard in zip(names, shards, strict=True) for name in shard},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def module_tree(folder: Path, rank: int, world: int, *, spec: str) -> tuple[Any, Any, Any]:
    """(modules with one rank's parameters by name and shape, all set to 1; sharding; coordinates)."""
    import torch
    from torch import nn

    from mega_rl.converters.hf.config import read_hf_config
    from mega_rl.converters.plan.ranks import build_plan
    from mega_rl.converters.plan.sharding import Sharding
    from mega_rl.parallel.layout import ParallelLayout

    layout = ParallelLayout(world_size=world, tp=world, etp=world)
    sharding = Sharding(read_hf_config(folder), layout, spec=spec)  # type: ignore[arg-type]
    root = nn.Module()
    for param in build_plan(sharding, layout.coordinates(rank)):
        *path, leaf = param.name.split(".")
        module = root
        for key in path:
            if key not in module._modules:
                module.add_module(key, nn.ModuleList() if key == "layers" else nn.Module())
            module = module.get_submodule(key)
        value = nn.Parameter(torch.ones(param.shape, dtype=torch.bfloat16), requires_grad=False)
        value.tensor_model_parallel = not param.replicated
        value.partition_dim = int(param.name.endswith(("linear_proj.weight", "linear_fc2.weight")))
        module.register_parameter(leaf, value)
    for i, layer in enumerate(root.get_submodule("decoder.layers").children()):
        layer.layer_number = i + 1
    return root, sharding, layout.coordinates(rank)


def digest(model: Any) -> str:
    """A hash of all parameters; names differ between layer specs, so they count by the order of the values' hashes."""
    import torch
    import xxhash

    values = [xxhash.xxh3_64_hexdigest(p.detach().view(-1).view(torch.uint8).numpy()) for p in model.parameters()]
    return xxhash.xxh3_64_hexdigest("".join(sorted(values)).encode())


def load_mega_rl(folder: Path, rank: int, world: int) -> dict[str, Callable[[], Any]]:
    """Loads with `load_hf`."""
    from mega_rl.converters.live.load import load_hf

    model, sharding, at = module_tree(folder, rank, world, spec="local")
    nbytes = sum(p.nbytes for p in model.parameters())

    def go() -> dict[str, Any]:
        report = load_hf([model], folder, sharding=sharding, coordinates=at)
        return {"bytes_read": report.bytes_read / nbytes}

    return {"go": go, "digest": lambda: digest(model)}


def load_floor(folder: Path, rank: int, world: int) -> dict[str, Callable[[], Any]]:
    """Maps the files and copies a rank's share of each tensor's bytes, in one piece, into memory that is there."""
    import torch

    from mega_rl.converters.safetensors.reader import CheckpointReader

    infos = list(CheckpointReader(folder).tensors.values())
    targets = {info.name: torch.ones(info.nbytes // world, dtype=torch.uint8) for info in infos}
    files = sorted({info.file for info in infos})

    def go() -> dict[str, Any]:
        maps = {
            file: torch.from_file(str(file), shared=True, size=file.stat().st_size, dtype=torch.uint8) for file in files
        }
        for info in infos:
            target = targets[info.name]
            start = info.offset + rank * len(target)
            target.copy_(maps[info.file][start : start + len(target)])
        return {}

    return {"go": go}


def load_transformers(folder: Path, rank: int, world: int) -> dict[str, Callable[[], Any]]:
    """`from_pretrained`, which allocates its model each time."""
    import torch
    from transformers import AutoModelForCausalLM

    def go() -> dict[str, Any]:
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        return {}

    return {"go": go}


def load_mbridge(folder: Path, rank: int, world: int) -> dict[str, Callable[[], Any]]:
    """Time mbridge's `load_weights` into the same parameters, under Transformer Engine's names as it needs them."""
    bridge, model = _mbridge(folder, rank, world)

    def go() -> dict[str, Any]:
        bridge.load_weights([model], str(folder))
        return {}

    return {"go": go, "digest": lambda: digest(model)}


def _mbridge(folder: Path, rank: int, world: int) -> tuple[Any, Any]:
    from mega_rl.parallel import accelerator

    device = accelerator.prepare("cpu")
    from transformers import AutoConfig

    from mega_rl.parallel import groups
    from mega_rl.parallel.layout import ParallelLayout

    groups.initialize(ParallelLayout(world_size=world, tp=world, etp=world), accelerator=device, timeout_s=60)
    from mbridge import AutoBridge

    config = AutoConfig.from_pretrained(folder)
    config.rope_theta = config.rope_parameters["rope_theta"]  # gone in transformers 5, and mbridge asks for it
    bridge = AutoBridge.from_config(config)
    model, sharding, _ = module_tree(folder, rank, world, spec="te")
    model.config = bridge.config
    model.share_embeddings_and_output_weights = config.tie_word_embeddings
    bridge.vocab_size, bridge.padded_vocab_size = config.vocab_size, sharding.vocab
    return bridge, model


def export_mega_rl(folder: Path, rank: int, world: int) -> dict[str, Callable[[], Any]]:
    """`save_hf` into a new folder: everything is on disk when it returns."""
    from mega_rl.converters.live.export import ModelPlace
    from mega_rl.converters.live.load import load_hf
    from mega_rl.converters.live.save import SaveOptions, save_hf

    model, sharding, at = module_tree(folder, rank, world, spec="local")
    load_hf([model], folder, sharding=sharding, coordinates=at)
    place = ModelPlace(sharding, at)
    shard_bytes = max(file.stat().st_size for file in folder.glob("*.safetensors"))
    out = folder.with_name("export_mega_rl")

    def go() -> dict[str, Any]:
        save_hf([model], out, source=folder, place=place, options=SaveOptions(shard_bytes=shard_bytes))
        return {}

    return {"go": go, "prepare": lambda: shutil.rmtree(out, ignore_errors=True), "check": lambda: differ(folder, out)}


def export_stream(folder: Path, rank: int, world: int) -> dict[str, Callable[[], Any]]:
    """`export_hf` over two ranks in buckets of 64 MiB, tensors dropped as they come."""
    from mega_rl.parallel import accelerator

    device = accelerator.prepare("cpu")
    from mega_rl.converters.live.export import ModelPlace, export_hf
    from mega_rl.converters.live.load import load_hf
    from mega_rl.parallel import groups

    model, sharding, at = module_tree(folder, rank, world, spec="local")
    load_hf([model], folder, sharding=sharding, coordinates=at)
    made = groups.initialize(sharding.layout, accelerator=device, timeout_s=60)

    place = ModelPlace.of(sharding, made, is_sharded=False, bucket_bytes=64 * MIB)

    def go() -> dict[str, Any]:
        return {"tensors": sum(1 for _ in export_hf([model], place))}

    return {"go": go}


def export_mbridge(folder: Path, rank: int, world: int) -> dict[str, Callable[[], Any]]:
    """Time mbridge's `export_weights`, dropping tensors as they come."""
    bridge, model = _mbridge(folder, rank, world)
    bridge.load_weights([model], str(folder))
    return {"go": lambda: {"tensors": sum(1 for _ in bridge.export_weights([model]))}}


def export_save_file(folder: Path, rank: int, world: int, *, sync: bool = True) -> dict[str, Callable[[], Any]]:
    """`safetensors.torch.save_file` of the source's tensors into as many files, each flushed to disk."""
    from safetensors.torch import load_file, save_file

    out = folder.with_name(f"export_save_file_{sync}")
    shards = {file.name: load_file(file) for file in sorted(folder.glob("*.safetensors"))}

    def go() -> dict[str, Any]:
        out.mkdir()
        for name, shard in shards.items():
            save_file(shard, out / name, metadata={"format": "pt"})
            if sync:
                fd = os.open(out / name, os.O_RDONLY)
                os.fsync(fd)
                os.close(fd)
        return {}

    return {"go": go, "prepare": lambda: shutil.rmtree(out, ignore_errors=True)}


def export_save_file_unsynced(folder: Path, rank: int, world: int) -> dict[str, Callable[[], Any]]:
    """The same without flushing: what is measured is mostly the page cache."""
    return export_save_file(folder, rank, world, sync=False)


def import_mega_rl(folder: Path, rank: int, world: int) -> dict[str, Callable[[], Any]]:
    """Offline import into a distributed checkpoint."""
    from mega_rl.converters.offline.convert import import_hf

    out = folder.with_name("import_mega_rl")

    def go() -> dict[str, Any]:
        import_hf(folder, out)
        return {}

    return {"go": go, "prepare": lambda: shutil.rmtree(out, ignore_errors=True)}


def differ(source: Path, exported: Path) -> list[str]:
    """Names of tensors that are not the same bytes in both checkpoints."""
    from safetensors import safe_open

    def tensors(folder: Path) -> dict[str, Any]:
        opened_tensors = {}
        for file in folder.glob("*.safetensors"):
            with safe_open(file, "pt") as opened:
                opened_tensors.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
        return opened_tensors

    a, b = tensors(source), tensors(exported)
    return sorted({*(a.keys() ^ b.keys()), *(n for n in a.keys() & b.keys() if not a[n].equal(b[n]))})


def serve(name: str, folder: Path, pipes: Path, rank: int, world: int) -> None:
    """Do what the driver says; the first answer lists the operations."""
    commands = Commands(pipes)
    operations = CONTENDERS[name](folder, rank, world)
    commands.answer({"operations": sorted(operations)})
    for command in commands:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts from here
        before = own_bytes("VmRSS")
        start = time.perf_counter()
        result = operations[command]()
        seconds = time.perf_counter() - start
        commands.answer({"seconds": seconds, "extra": own_bytes("VmHWM") - before, "result": result})


CONTENDERS: dict[str, Callable[[Path, int, int], dict[str, Callable[[], Any]]]] = {
    "load_mega_rl": load_mega_rl,
    "load_floor": load_floor,
    "load_transformers": load_transformers,
    "load_mbridge": load_mbridge,
    "export_mega_rl": export_mega_rl,
    "export_stream": export_stream,
    "export_mbridge": export_mbridge,
    "export_save_file": export_save_file,
    "export_save_file_unsynced": export_save_file_unsynced,
    "import_mega_rl": import_mega_rl,
}


# The driver.


class Contender:
    """The processes of one contender, one per rank; made when all have their model and wait."""

    def __init__(self, name: str, folder: Path, world: int) -> None:
        self.name = name
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._ranks: list[driver.Contender] = []
        for rank in range(world):
            pipes = Path(tempfile.mkdtemp(prefix=f"{name}-{rank}-", dir=folder.parent)) / "pipes"
            variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": ""}
            variables |= {key: str(rank) for key in ("RANK", "LOCAL_RANK")}
            variables |= {key: str(world) for key in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
            arguments = [__file__, "--serve", name, str(folder), str(pipes), str(rank), str(world)]
            self._ranks.append(driver.Contender(name, pipes, arguments, **variables))
        self.operations: list[str] = [rank.answer(START_S) for rank in self._ranks][-1]["operations"]

    def do(self, command: str) -> list[dict[str, Any]]:
        """Return the answers of all ranks to one command, which they follow at once."""
        for rank in self._ranks:
            rank.send(command)
        return [rank.answer(OPERATION_S) for rank in self._ranks]

    def step(self) -> dict[str, Any]:
        """One timed operation: the slowest rank's time, the largest rank's memory."""
        if "prepare" in self.operations:
            self.do("prepare")
        answers = self.do("go")
        return {
            "seconds": max(a["seconds"] for a in answers),
            "extra": max(a["extra"] for a in answers),
            "results": [a["result"] for a in answers],
        }

    def stop(self) -> None:
        """End its processes."""
        for rank in self._ranks:
            rank.stop()


@dataclass(frozen=True)
class Target:
    """A bound on the upper end of the interval of ours / theirs, 0: shown without a bound."""

    other: str
    bound: float = 0.0


@dataclass(frozen=True)
class Scenario:
    """One table of the report."""

    model: str
    world: int
    ours: str
    targets: tuple[Target, ...]
    largest: bool = False  # the bound on memory holds


SCENARIOS = {
    "load dense TP1": Scenario(
        "dense",
        1,
        "load_mega_rl",
        (Target("load_floor", 1.3), Target("load_mbridge", 0.2), Target("load_transformers")),
        largest=True,
    ),
    "load dense TP2": Scenario(
        "dense", 2, "load_mega_rl", (Target("load_floor", 1.3), Target("load_mbridge", 0.2)), largest=True
    ),
    "load moe TP1": Scenario(
        "moe", 1, "load_mega_rl", (Target("load_floor", 1.3), Target("load_transformers")), largest=True
    ),
    "load moe TP2": Scenario("moe", 2, "load_mega_rl", (Target("load_floor", 1.3),), largest=True),
    "export dense TP1 to a folder": Scenario(
        "dense", 1, "export_mega_rl", (Target("export_save_file", 1.3), Target("export_save_file_unsynced"))
    ),
    "export moe TP1 to a folder": Scenario(
        "moe", 1, "export_mega_rl", (Target("export_save_file", 1.3), Target("export_save_file_unsynced"))
    ),
    "export dense TP2 in memory": Scenario("dense", 2, "export_stream", (Target("export_mbridge"),)),
    "import dense to a distributed checkpoint": Scenario("dense", 1, "import_mega_rl", (Target("export_save_file"),)),
}


def measure(scenario: Scenario, folder: Path, *, rounds: int, warmup: int) -> dict[str, Any]:
    """Samples of every contender in rounds of alternating order, and what was checked."""
    contenders: list[Contender] = []
    try:
        for name in (scenario.ours, *(t.other for t in scenario.targets)):
            contenders.append(Contender(name, folder, scenario.world))
        records: dict[str, list[dict[str, Any]]] = {c.name: [] for c in contenders}
        for number in range(warmup + rounds):
            for contender in alternating(contenders, number):
                sample = contender.step()
                if number >= warmup:
                    records[contender.name].append(sample)
        digests = {tuple(a["result"] for a in c.do("digest")) for c in contenders if "digest" in c.operations}
        faults = [a["result"] for c in contenders if "check" in c.operations for a in c.do("check")]
        return {"records": records, "equal": len(digests) <= 1 and not any(faults)}
    finally:
        for contender in contenders:
            contender.stop()


def report(title: str, scenario: Scenario, result: dict[str, Any], largest: int, outcome: Report) -> None:
    """Print one scenario."""
    records = result["records"]
    ours = records[scenario.ours]
    print(f"\n{title}")
    for name, samples in records.items():
        seconds = [s["seconds"] for s in samples]
        extra = max(s["extra"] for s in samples) / MIB
        print(
            f"  {name:26s} {statistics.median(seconds):7.3f} s (min {min(seconds):.3f}), extra memory {extra:6.0f} MiB"
        )
    if not result["equal"]:
        outcome.wrong.append(f"{title}: the contenders' results differ")
    for target in scenario.targets:
        theirs = [sample["seconds"] for sample in records[target.other]]
        own = [sample["seconds"] for sample in ours]
        print("  " + outcome.add(compare(f"{title}, ours / {target.other}", own, theirs, target.bound or None)))
    shares = [r["bytes_read"] for s in ours for r in s["results"] if r and "bytes_read" in r]
    if shares:
        print(f"  bytes taken per rank / bytes of its shard: {max(shares):.4f} (at most 1.05)")
        if max(shares) > 1.05:
            outcome.missed.append(f"{title}: bytes taken per rank {max(shares):.4f} of its shard")
    if scenario.largest:
        extra, bound_bytes = max(s["extra"] for s in ours), largest + 64 * MIB
        print(f"  extra memory {extra / MIB:.0f} MiB (at most {bound_bytes / MIB:.0f}: largest tensor and 64)")
        if extra > bound_bytes:
            outcome.missed.append(f"{title}: extra memory {extra / MIB:.0f} MiB")


def main() -> int:
    """Print every scenario; the exit code is that of `Report.end`."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--only", default="", help="scenarios whose name holds this")
    parser.add_argument("--serve", nargs=5, help=argparse.SUPPRESS)  # name, folder, pipes, rank, world
    arguments = parser.parse_args()
    if arguments.serve:
        name, folder, pipes, rank, world = arguments.serve
        serve(name, Path(folder), Path(pipes), int(rank), int(world))
        return 0
    outcome = Report(arguments)
    rounds, warmup = (2, 1) if arguments.tiny else (arguments.rounds, arguments.warmup)
    everything: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="bench_") as name:
        for model, config in MODELS.items():
            write_source(Path(name) / model, config | (TINY if arguments.tiny else {}))
        os.sync()
        for title, scenario in SCENARIOS.items():
            if arguments.only not in title:
                continue
            folder = Path(name) / scenario.model
            result = measure(scenario, folder, rounds=rounds, warmup=warmup)
            config = json.loads((folder / "config.json").read_text())
            largest = config["vocab_size"] * config["hidden_size"] * 2
            report(title, scenario, result, largest, outcome)
            everything[title] = result
    return outcome.end(everything)


if __name__ == "__main__":
    sys.exit(main())
