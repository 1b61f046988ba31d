"""Traffic of live engines on every rank of many layouts, for the comparison with the plan."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mega_rl.config.schema import Config
from tests.helpers.counting import Collective, CollectiveRecorder
from tests.helpers.engines import replaced, running_engine
from tests.helpers.models import random_experience
from tests.helpers.selection import without
from tests.unit_tests.plan.states_on_ranks import SP
from tests.unit_tests.plan.states_on_ranks import config_of as config_of_sections

LENGTH = 16  # tokens of every sequence
ROWS = 8  # sequences of a mini-batch on a data-parallel rank
MICRO = 64  # tokens of a micro-batch
ALLGATHER = {"dispatcher": "allgather"}
FULL, SELECTIVE = {"recompute": "full"}, {"recompute": "selective"}
EP2 = {"tp": 2, "ep": 2, "etp": 1, **SP}
# name -> (world size, checkpoint, case); a case has sections of `engine.megatron`, and "model".
ALL: dict[str, tuple[int, str, dict[str, Any]]] = {
    "dp2": (2, "qwen3", {}),
    "dp2, fp32": (2, "qwen3", {"dtype": "fp32"}),
    "dp2, not distributed": (2, "qwen3", {"optimizer": {"distributed": False}}),
    "tp2": (2, "qwen3", {"megatron": {"tp": 2}}),
    "tp2-sp": (2, "qwen3", {"megatron": {"tp": 2, **SP}}),
    "tp2-sp, critic": (2, "qwen3", {"megatron": {"tp": 2, **SP}, "head": "value"}),
    "tp2-sp, full": (2, "qwen3", {"megatron": {"tp": 2, **SP}, "model": {"recompute": "full"}}),
    "tp2-sp, full in part": (2, "qwen3", {"megatron": {"tp": 2, **SP}, "model": {**FULL, "recompute_layers": 1}}),
    "tp2-sp, mlp": (2, "qwen3", {"megatron": {"tp": 2, **SP}, "model": {**SELECTIVE, "recompute_modules": ["mlp"]}}),
    "cp2": (2, "qwen3", {"megatron": {"cp": 2}}),
    "cp2, core_attn": (2, "qwen3", {"megatron": {"cp": 2}, "model": {"recompute": "selective"}}),
    "pp2, tied": (2, "qwen3", {"megatron": {"pp": 2}}),
    "pp2-vpp2": (2, "llama", {"megatron": {"pp": 2, "vpp": 2}}),
    "ep2": (2, "qwen3_moe", {"megatron": {"ep": 2}}),
    "ep2, full": (2, "qwen3_moe", {"megatron": {"ep": 2}, "model": {"recompute": "full"}}),
    "ep2, allgather": (2, "qwen3_moe", {"megatron": {"ep": 2}, "moe": ALLGATHER}),
    "tp2-sp, experts cut": (2, "qwen3_moe", {"megatron": {"tp": 2, **SP}}),
    "latent, tp2-sp-ep2": (2, "deepseek_v3", {"megatron": EP2}),
    "latent, moe again": (2, "deepseek_v3", {"megatron": EP2, "model": {**SELECTIVE, "recompute_modules": ["moe"]}}),
    "latent, cp2": (2, "deepseek_v3", {"megatron": {"cp": 2}}),
    "no query rank": (2, "deepseek_v2", {"megatron": {"tp": 2, "etp": 1, **SP}}),
    "gated shared experts": (2, "qwen2_moe", {"megatron": {"tp": 2, "etp": 1, **SP}}),
    "tp2-pp2-sp": (4, "qwen3", {"megatron": {"tp": 2, "pp": 2, **SP}}),
    "tp2-dp2": (4, "qwen3", {"megatron": {"tp": 2}}),
    "tp2-cp2-sp": (4, "qwen3", {"megatron": {"tp": 2, "cp": 2, **SP}}),
    "tp2-sp-ep4": (4, "deepseek_v3", {"megatron": {"tp": 2, "ep": 4, "etp": 1, **SP}}),
    "ep2-pp2": (4, "qwen3_moe", {"megatron": {"ep": 2, "pp": 2}}),
    "ep2-dp2": (4, "qwen3_moe", {"megatron": {"ep": 2}}),
}
IN_MAKE_TEST = ("dp2", "tp2", "tp2-sp, full", "cp2", "pp2, tied", "tp2-sp, experts cut", "latent, tp2-sp-ep2")
CASES = without(ALL, *(name for name in ALL if name not in IN_MAKE_TEST))
COUNTED = (torch.bfloat16, torch.float32, torch.bool)  # others are metrics, shapes, counts and JSON
STEERING = 96  # bytes, at most, of norms, flags and loads of experts; a layer of this size sends more


def config_of(checkpoint: Path, case: dict[str, Any]) -> Config:
    """Return the config of a case, with attention that tensor modes can see through."""
    config = config_of_sections(checkpoint, case)
    config = replaced(config, "engine.megatron.moe", **case.get("moe", {}))
    config = replaced(config, "trainer.microbatch", max_tokens=MICRO)
    return replaced(config, "model", attn_implementation="eager", **case.get("model", {}))


def run_cases(rank: int, cases: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, dict[str, Counter[Any]]]:
    """Return {pass: {(operator, ranks of the group, stride of the group): bytes}} of every case on this rank."""
    return {name: _sent(Path(checkpoint), case) for name, (checkpoint, case) in cases.items()}


def _sent(checkpoint: Path, case: dict[str, Any]) -> dict[str, Counter[Any]]:
    from tests.unit_tests.distributed.engine_cases import losses

    head = case.get("head", "lm")
    with running_engine(config_of(checkpoint, case), head=head) as engine:
        rows = random_experience(num_prompts=ROWS // 2, longest=LENGTH)
        rows.lengths[:] = LENGTH
        with CollectiveRecorder() as forward:
            engine.forward(rows)
        with CollectiveRecorder() as training:
            engine.train_minibatch(rows, losses(head), lr=1e-3)
        groups = engine.groups.collection
        return {
            name: _by_group(recorder.collectives, groups)
            for name, recorder in (("forward", forward), ("training", training))
        }


def _by_group(collectives: list[Collective], groups: Any) -> Counter[Any]:
    """Return the bytes that leave the rank by operator and group; of what stands in for an operator on gloo, its own.

    gloo has neither a fast reduce-scatter and all-gather of buffers, which `mega_rl.ddp.bucket_groups` makes of an
    all-to-all and of every rank's broadcast, nor those of uneven parts, for which `accelerator.patches` has an
    all-to-all of copies and an all-reduce.
    """
    of_buffers = {groups.dp_cp.group_name, groups.expt_dp.group_name}
    of_cut_experts = {groups.expt_tp.group_name}
    sent: Counter[Any] = Counter()
    for each in collectives:
        op, nbytes, d = each.op, each.nbytes, each.size
        if d == 1 or not each.sends or each.dtype not in COUNTED:
            continue
        if (nbytes * d // (2 * (d - 1)) if op == "all_reduce" else nbytes) <= STEERING:
            continue
        if each.group in of_buffers:
            nbytes = nbytes * (d - 1) // d if op == "broadcast" else nbytes
            op = {"all_to_all": "reduce_scatter", "broadcast": "all_gather"}.get(op, op)
        if each.group in of_cut_experts:
            nbytes = nbytes // 2 if op == "all_reduce" else nbytes
            op = {"all_to_all": "all_gather", "all_reduce": "reduce_scatter"}.get(op, op)
        ranks = dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(each.group))
        sent[op, d, ranks[1] - ranks[0]] += nbytes
    return sent
