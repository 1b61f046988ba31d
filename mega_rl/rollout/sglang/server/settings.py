"""Settings of a server, and its process's command line and environment. Imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mega_rl
from mega_rl.config.rules.rollout import is_loopback
from mega_rl.environment import of_other_programs
from mega_rl.rollout.sglang.server import launcher
from mega_rl.rollout.sglang.server.addresses import interface_of
from mega_rl.rollout.sglang.server.installation import with_tools
from mega_rl.rollout.sglang.server.nodes import Node

_CPU_TOKENS = 32768  # on a CPU SGLang would size the KV cache by the machine's memory, which is the trainer's too
# Variables that a launcher sets for ranks. A server that had them would take itself for one of the ranks.
_OF_A_RANK = (
    "RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS",
    "MEGA_RL_GENERATION",
)  # fmt: skip
_PREFIXES_OF_A_RANK = ("TORCHELASTIC_", "PET_", "MEGA_RL_SGLANG_")


@dataclass(frozen=True)
class ServerSettings:
    """Settings of one server, or of one node's part of it."""

    model_path: Path  # checkpoint in Hugging Face's format
    host: str = "127.0.0.1"  # address to listen on, of this host
    tp: int = 1  # tensor-parallel ranks, on all nodes
    nodes: int = 1  # hosts that it spans
    node: int = 0  # number of this one, the part's; 0 has the server's URL
    dtype: str = "float32"  # weights and activations: float32, bfloat16 or float16
    device: str = "cpu"  # or cuda
    max_total_tokens: int = 0  # in the KV cache; 0: SGLang's choice on CUDA, 32768 on a CPU
    mem_fraction: float = 0.0  # CUDA: share of the memory for weights and KV cache; 0: SGLang's choice
    memory_saver: bool = False  # CUDA: weights and KV cache can be released
    deterministic: bool = False  # CUDA: the same tokens whatever else is in the batch
    base_gpu: int = 0  # CUDA: the first of `tp_here` devices, counted in CUDA_VISIBLE_DEVICES
    seed: int = 0  # for draws that ignore the request's seed; on CUDA all, unless `deterministic`
    start_timeout_s: float = 600.0  # from start() to the first token
    return_routing: bool = False  # requests may ask for the experts of their tokens
    args: Mapping[str, object] = field(default_factory=dict)  # further ones, by SGLang's names; see `command_line`

    @property
    def tp_here(self) -> int:
        """Return the tensor-parallel ranks of this node."""
        return self.tp // self.nodes

    @property
    def http_host(self) -> str:
        """Return the address of requests: of a further node only this host asks, after its health."""
        return "127.0.0.1" if self.node else self.host


def arguments(settings: ServerSettings, port: int, meeting: Node | None = None) -> list[str]:
    """Return SGLang's command line; it never holds keys or trust_remote_code.

    meeting: of a server on several nodes.
    """
    given = {
        "--model-path": settings.model_path.resolve(),
        "--host": settings.http_host,
        "--port": port,
        "--device": settings.device,
        "--dtype": settings.dtype,
        "--tp-size": settings.tp,
        "--random-seed": settings.seed,
    }
    if meeting is not None:
        given |= {"--nnodes": settings.nodes, "--node-rank": settings.node, "--dist-init-addr": meeting.init_address}
    flags = ["--skip-tokenizer-init", *(["--enable-return-routed-experts"] if settings.return_routing else [])]
    if settings.device == "cpu":
        given["--attention-backend"] = "torch_native"
        given["--max-total-tokens"] = settings.max_total_tokens or _CPU_TOKENS
        flags += ["--sleep-on-idle"]  # else a server without requests keeps a core busy, which the trainer needs
    else:
        given["--base-gpu-id"] = settings.base_gpu
        if settings.max_total_tokens:
            given["--max-total-tokens"] = settings.max_total_tokens
        if settings.mem_fraction:
            given["--mem-fraction-static"] = settings.mem_fraction
        flags += ["--enable-memory-saver"] if settings.memory_saver else []
        flags += ["--enable-deterministic-inference"] if settings.deterministic else []
    return [*(str(part) for pair in given.items() for part in pair), *flags, *command_line(settings.args)]


def command_line(args: Mapping[str, object]) -> list[str]:
    """Return arguments of SGLang by the names of its ServerArgs as words of its command line.

    True is a flag, a list several words, a mapping JSON.
    """
    words: list[str] = []
    for name, value in args.items():
        words.append("--" + name.replace("_", "-"))
        if isinstance(value, list):
            words += map(str, value)
        elif value is not True:
            words.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return words


def environment(settings: ServerSettings, *, scratch: Path, packages: Path | None) -> dict[str, str]:
    """Return the server's environment: the trainer's without what torchrun and the run have set for ranks.

    Plus paths and threads. SGLang decides about CUDA and NCCL itself.
    """
    clean = {
        name: value
        for name, value in with_tools(of_other_programs()).items()
        if name not in _OF_A_RANK and not name.startswith(_PREFIXES_OF_A_RANK)
    }
    paths = [str(Path(mega_rl.__file__).parents[1]), *([str(packages)] if packages else [])]
    clean["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [clean.get("PYTHONPATH")])])
    clean[launcher.SCRATCH_VARIABLE] = str(scratch)
    clean[launcher.TRAINER_VARIABLE] = str(os.getpid())
    clean[launcher.DEVICE_VARIABLE] = settings.device
    if settings.device == "cpu":
        clean["SGLANG_CPU_OMP_THREADS_BIND"], threads = cpu_binding(settings.tp_here, sorted(os.sched_getaffinity(0)))
        clean["OMP_NUM_THREADS"] = str(threads)
        clean["OMP_WAIT_POLICY"] = "passive"  # threads without work sleep as well
    # Colocated servers get weights from memory: no group of theirs has members elsewhere unless they span hosts.
    if is_loopback(settings.host) or (settings.device == "cuda" and settings.memory_saver and settings.nodes == 1):
        clean["GLOO_SOCKET_IFNAME"] = clean["NCCL_SOCKET_IFNAME"] = "lo"
    elif settings.nodes > 1 and (interface := interface_of(settings.host)):
        clean = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface, **clean}
    if settings.nodes > 1:
        clean["SGLANG_HOST_IP"] = settings.host  # for the queue of requests, which else takes the first interface
    return clean


def cpu_binding(ranks: int, cpus: Sequence[int]) -> tuple[str, int]:
    """Return each rank's CPUs in SGLang's notation, "0,1|2,3", and its threads.

    Ranks have equal shares of `cpus`; where there are more ranks than CPUs they take turns on them.
    """
    share = max(1, len(cpus) // ranks)
    groups = [[cpus[(rank * share + place) % len(cpus)] for place in range(share)] for rank in range(ranks)]
    return "|".join(",".join(map(str, own)) for own in groups), share
