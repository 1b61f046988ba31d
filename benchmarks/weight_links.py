"""What a weight update moves, counted from the plans that transports send by, at 1, 8 and 64 hosts of 8 GPUs.

Nothing is sent and no process is started: the figures are sums over `plan_buckets` and `export_plan`, which
tests/unit_tests/rollout/sglang/test_weight_links.py holds to what transports send. See README.md.

    python benchmarks/weight_links.py
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mega_rl.converters.hf.config import parse_hf_config
from mega_rl.converters.live.export import buckets
from mega_rl.converters.plan.export import export_plan
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.rollout.sglang.weights.reshard import plan_buckets

GPUS = 8  # of a host
BUCKET_BYTES = 256 << 20
ITEMSIZE = 2
QWEN3: dict[str, Any] = {"vocab_size": 151936, "rms_norm_eps": 1e-6, "head_dim": 128, "max_position_embeddings": 40960}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-32B": {
        **QWEN3,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "Qwen3-30B-A3B": {
        **QWEN3,
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
# model -> layout by number of hosts
LAYOUTS: dict[str, dict[int, dict[str, int]]] = {
    "Qwen3-32B": {1: {"tp": 8}, 8: {"tp": 8, "pp": 4}, 64: {"tp": 8, "pp": 4}},
    "Qwen3-30B-A3B": {1: {"ep": 8}, 8: {"ep": 64}, 64: {"ep": 64, "pp": 2}},
}


@dataclass(frozen=True)
class Separate:
    """An update of servers with devices of their own, over process groups."""

    model_bytes: int
    out: dict[int, int]  # rank of the trainer -> bytes that it sends to servers
    requests: int  # of one update
    joining: int  # requests of the first update besides


def separate(sharding: Sharding, *, servers: int, bucket_bytes: int, itemsize: int) -> Separate:
    """Count what `DistributedTransport` sends. A broadcast leaves its source once, as over NCCL."""
    plan = plan_buckets(sharding, bucket_bytes=bucket_bytes, itemsize=itemsize, by_stage=True)
    out: Counter[int] = Counter()
    for bucket in plan:
        out[bucket.pp_rank * sharding.layout.stage_size] += bucket.nbytes
    return Separate(sum(out.values()), dict(out), servers * len(plan), servers * sharding.layout.pp)


def received(sharding: Sharding, *, itemsize: int) -> dict[int, Counter[int]]:
    """Return rank -> rank -> bytes that the first gets from the second while all weights are gathered on all ranks.

    Within a group bytes go around from rank to rank, as in NCCL's rings: each gets them once, from the one before it.
    """
    layout = sharding.layout
    rows: Counter[tuple[int, bool, range]] = Counter()  # (pipeline rank, of experts, holders) -> bytes of each holder
    for unit in export_plan(sharding):
        rows[unit.pp_rank, unit.of_experts, unit.holders] += unit.numel * (4 if unit.float32 else itemsize)
    result: dict[int, Counter[int]] = {rank: Counter() for rank in range(layout.world_size)}
    for (stage, of_experts, holders), nbytes in rows.items():
        size = layout.ep * layout.etp if of_experts else layout.tp
        for rank, sources in result.items():
            at = rank % layout.stage_size % size  # place in the group that gathers
            if at in holders and layout.pp > 1 and rank // layout.stage_size != stage:
                sources[(rank - layout.stage_size) % layout.world_size] += nbytes
            before = rank - at + (at - 1) % size
            sources[before] += nbytes * sum(holder != at for holder in holders)
    return result


def entering(received_by: dict[int, Counter[int]], *, gpus: int) -> dict[int, int]:
    """Return host -> bytes that its ranks get from ranks of other hosts."""
    into: Counter[int] = Counter()
    for rank, sources in received_by.items():
        into[rank // gpus] += sum(nbytes for source, nbytes in sources.items() if source // gpus != rank // gpus)
    return dict(into)


def gather_bytes(sharding: Sharding, *, bucket_bytes: int, itemsize: int) -> int:
    """Return the bytes of a rank's buffer for what is gathered at a time."""
    plan = buckets(export_plan(sharding), bucket_bytes=bucket_bytes, itemsize=itemsize)
    return max(
        len(bucket[0].holders) * sum(unit.numel for unit in bucket) * (4 if bucket[0].float32 else itemsize)
        for bucket in plan
    )


def table() -> Iterator[str]:
    """Yield the lines of the README's table."""
    columns = (
        "model, hosts, layout",
        "separate: sent by the busiest rank",
        "into the busiest host",
        "requests",
        "buffer of a gather",
    )
    yield f"| {' | '.join(columns)} |"
    yield "|---|---|---|---|---|"
    for model, by_hosts in LAYOUTS.items():
        for hosts, sizes in by_hosts.items():
            sharding = Sharding(parse_hf_config(MODELS[model]), ParallelLayout(world_size=GPUS * hosts, **sizes))
            counted = separate(sharding, servers=hosts, bucket_bytes=BUCKET_BYTES, itemsize=ITEMSIZE)
            whole, layout = counted.model_bytes, sharding.layout
            into = max(entering(received(sharding, itemsize=ITEMSIZE), gpus=GPUS).values())
            members = max(layout.tp, layout.ep * layout.etp)
            before = hosts * whole
            buffer = gather_bytes(sharding, bucket_bytes=BUCKET_BYTES, itemsize=ITEMSIZE)
            yield (
                f"| {model}, {hosts}, {layout} | {_gb(before)} -> {_gb(max(counted.out.values()))} "
                f"| {_gb(into)} | {counted.requests} "
                f"| {_gb(members * BUCKET_BYTES)} -> {_gb(buffer)} |"
            )


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes < 1e12 else f"{nbytes / 1e12:.2f} TB"


def main() -> int:
    """Print the table."""
    for line in table():
        sys.stdout.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
