"""Fills a live Megatron-Core model from rank files or a distributed checkpoint of any layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from torch import Tensor, nn

from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.live.copying import fill_all
from mega_rl.converters.live.load import LoadReport, weights_of
from mega_rl.converters.offline.formats import WeightFiles, open_checkpoint
from mega_rl.converters.plan.proof import prove_complete
from mega_rl.converters.plan.ranks import ParamPlan, build_plan
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.errors import UserErrors
from mega_rl.parallel.layout import RankCoordinates

# What must agree for weights of one model to be those of another; how tensors are spelt on disk need not.
_SAME = (
    "family", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_hidden_size", "vocab_size",
    "tied", "qkv_bias", "linear_bias", "qk_norm", "mla", "moe", "post_norms", "sinks", "mtp_layers", "mtp",
)  # fmt: skip


def load_ranks(
    chunks: Sequence[nn.Module],
    path: str | Path,
    *,
    sharding: Sharding,
    coordinates: RankCoordinates,
    threads: int | None = None,
) -> LoadReport:
    """Copies this rank's part of a converted checkpoint into `chunks`, whatever layout it is stored in.

    `chunks` are unwrapped GPTModels, one per virtual pipeline stage. Values are cast to each parameter's dtype. No
    collectives: every rank reads the parts of the files that it needs.

    Raises UserErrors, the same on every rank and before any data is read, when the checkpoint is damaged, holds another
    model than `sharding` describes, or when the model cannot be cut into its layout.
    """
    start = perf_counter()
    prove_complete(sharding)
    proved = perf_counter()
    with open_checkpoint(path) as checkpoint:
        opened = perf_counter()
        _check_same(checkpoint, sharding)
        jobs: list[tuple[ParamPlan, Tensor]] = []
        for vp_stage, chunk in enumerate(chunks):
            plan = build_plan(sharding, coordinates, vp_stage=vp_stage, origin="canonical")
            params = weights_of(chunk)
            planned, live = ({p.name: p.shape for p in plan}, {name: tuple(t.shape) for name, t in params.items()})
            assert planned == live, f"model and plan differ: {set(planned.items()) ^ set(live.items())}"
            jobs += [(param, params[param.name]) for param in plan]
        kept = [param.name for param, _ in jobs if param.canonical in checkpoint.absent]
        jobs = [job for job in jobs if job[0].canonical not in checkpoint.absent]
        copies = [(live, checkpoint.stored(param.copies)) for param, live in jobs]
        planned_at = perf_counter()
        fill_all(copies, checkpoint.files, threads=threads)
        plan_s = proved - start + planned_at - opened
        seconds = {"open": opened - proved, "plan": plan_s, "read": perf_counter() - planned_at}
        return LoadReport(len(jobs), checkpoint.files.bytes_read, tuple(kept), checkpoint.ignored, seconds)


def _check_same(checkpoint: WeightFiles, sharding: Sharding) -> None:
    """Raises UserErrors listing what tells the stored model from the live one."""
    stored: HFConfig = checkpoint.hf
    problems = [
        f"{checkpoint.path}: holds a model with {name}={getattr(stored, name)!r}, the model to fill has "
        f"{getattr(sharding.hf, name)!r}"
        for name in _SAME
        if getattr(stored, name) != getattr(sharding.hf, name)
    ]
    if checkpoint.sharding.head != sharding.head:
        problems.append(f"{checkpoint.path}: holds head={checkpoint.sharding.head}, the model has {sharding.head}")
    if checkpoint.kind == "hf":
        problems = [f"checkpoint {checkpoint.path}: is a Hugging Face checkpoint; load it as one"]
    if problems:
        raise UserErrors(problems)
