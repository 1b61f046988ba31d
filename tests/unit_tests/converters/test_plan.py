"""The index map against a split written out head by head, its inverse, and the proof that it is complete."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.families import FAMILIES
from mega_rl.converters.families.dense import DENSE, MLP
from mega_rl.converters.families.rules import Rule, Source
from mega_rl.converters.hf.config import parse_hf_config
from mega_rl.converters.plan import blocks, proof
from mega_rl.converters.plan import ranks as plan
from mega_rl.converters.plan.blocks import Copy
from mega_rl.converters.plan.export import export_plan
from mega_rl.converters.plan.parameters import hf_tensors, ignored_tensors, mtp_tensors
from mega_rl.converters.plan.proof import prove_complete, tiling_faults
from mega_rl.converters.plan.ranks import ParamPlan, build_plan
from mega_rl.converters.plan.sharding import Head, Sharding, Spec, check_layout, padded_vocab_size
from mega_rl.converters.safetensors.header import matrix_shape
from mega_rl.errors import UserErrors
from mega_rl.parallel.layout import ParallelLayout, RankCoordinates
from tests.helpers.selection import covering
from tests.unit_tests.converters.fakes import (
    LAYOUTS,
    MORE_LAYOUTS,
    State,
    hf_state,
    ranks,
    reference_params,
    small_config,
    small_mla,
    small_moe,
)
from tests.unit_tests.converters.tiny_configs import TINY

ALL_LAYOUTS = LAYOUTS | MORE_LAYOUTS


def matrix(tensor: Tensor) -> Tensor:
    return tensor.view(matrix_shape(tuple(tensor.shape)))


def source_part(source: Tensor, c: Copy) -> Tensor:
    """The elements of a tensor that a copy takes, as they lie in the parameter; a view."""
    if c.transposed:
        return matrix(source)[c.src_row : c.src_row + c.cols, c.src_col :: c.step][:, : c.rows].T
    return matrix(source)[c.src_row : c.src_row + c.rows, c.src_col : c.src_col + c.cols]


def shard_by_plan(copies: Iterable[Copy], shape: tuple[int, ...], state: State) -> Tensor:
    """Applies copies one by one; what no copy writes stays NaN."""
    result = torch.full(shape, float("nan"))
    for c in copies:
        target = matrix(result)[c.dst_row : c.dst_row + c.rows, c.dst_col : c.dst_col + c.cols]
        if c.hf_name is None:
            target.zero_()
        else:
            target.copy_(source_part(state[c.hf_name], c))
    return result


def export_by_plan(sharding: Sharding, held: dict[tuple[RankCoordinates, int, str], Tensor]) -> State:
    """Applies the export plan to what every rank holds; elements that nothing writes stay NaN."""
    layout, exported = sharding.layout, State()
    everyone = ranks(layout)
    for unit in export_plan(sharding):
        stage = [at for at in everyone if at.pp_rank == unit.pp_rank]
        if unit.of_experts:
            index = {(at.ep_rank, at.etp_rank): at for at in stage}
            members = [index[divmod(i, layout.etp)] for i in range(layout.ep * layout.etp)]
        else:
            members = [next(at for at in stage if at.tp_rank == i) for i in range(layout.tp)]
        for name, shape, pieces in unit.tensors:
            assert name not in exported, name
            result = exported[name] = torch.full(shape, float("nan"))
            for member, position, c in pieces:
                shard = matrix(held[members[member], unit.vp_stage, unit.params[position].name])
                taken = shard[c.dst_row : c.dst_row + c.rows, c.dst_col : c.dst_col + c.cols]
                source_part(result, c).copy_(taken)
    return exported


def check_against_reference(hf: HFConfig, layout: ParallelLayout, *, head: Head = "lm", spec: Spec = "local") -> None:
    """load == reference split on every rank, export(load) == identity, and the proof holds."""
    sharding = Sharding(hf, layout, spec=spec, head=head)
    state = hf_state(hf, value_head=head == "value")
    held: dict[tuple[RankCoordinates, int, str], Tensor] = {}
    for at in ranks(layout):
        for vp_stage in range(layout.vpp):
            expected = reference_params(hf, state, layout, at, vp_stage, spec=spec)
            planned = build_plan(sharding, at, vp_stage=vp_stage)
            assert {param.name: param.shape for param in planned} == {n: tuple(t.shape) for n, t in expected.items()}
            for param in planned:
                actual = shard_by_plan(param.copies, param.shape, state)
                assert torch.equal(actual, expected[param.name]), (param.name, at)
                held[at, vp_stage, param.name] = actual
    exported = export_by_plan(sharding, held)
    assert exported.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(exported[name], tensor), name
    prove_complete(sharding)


def fits(hf: HFConfig, layout: ParallelLayout) -> bool:
    return not check_layout(hf, layout)


VARIANTS = covering(product(ALL_LAYOUTS, ("untied", "tied"), ("local", "te")), strength=2)


@pytest.mark.parametrize(("layout_name", "embeddings", "spec"), VARIANTS)
def test_every_layout_against_the_reference(layout_name: str, embeddings: str, spec: Spec) -> None:
    layout, tied = ALL_LAYOUTS[layout_name], embeddings == "tied"
    if layout.ep == 1:
        check_against_reference(small_config(tied=tied), layout, spec=spec)
    moe = small_moe(tied=tied)
    check_against_reference(moe, layout, spec=spec)
    check_against_reference(dataclasses.replace(moe, fused_experts=True), layout, spec=spec)
    check_against_reference(small_mla(tied=tied, hidden_size=12), layout, spec=spec)
    check_against_reference(small_mla(tied=tied, mtp="drop"), layout, spec=spec)


@pytest.mark.parametrize("layout", ALL_LAYOUTS.values(), ids=ALL_LAYOUTS)
def test_value_head(layout: ParallelLayout) -> None:
    if layout.ep == 1:
        check_against_reference(small_config(tied=True), layout, head="value")
    check_against_reference(small_moe(), layout, head="value")
    check_against_reference(small_mla(mtp="drop"), layout, head="value")


def family_config(name: str) -> HFConfig:
    return dataclasses.replace(parse_hf_config(TINY[name]), mtp="load")


FITTING = covering(
    ((name, at) for name in TINY for at in ALL_LAYOUTS if fits(family_config(name), ALL_LAYOUTS[at])), times=3
)


@pytest.mark.parametrize("name", TINY)
def test_every_family_against_the_reference(name: str) -> None:
    config = family_config(name)
    spellings = {config.fused_experts, True} if config.moe is not None else {False}
    for layout in (ALL_LAYOUTS[at] for family, at in FITTING if family == name):
        for fused in spellings:
            check_against_reference(dataclasses.replace(config, fused_experts=fused), layout)


@pytest.mark.parametrize("name", TINY)
def test_every_family_is_proved_complete_in_every_layout(name: str) -> None:
    config, proved = parse_hf_config(TINY[name]), 0
    for layout in ALL_LAYOUTS.values():
        if not fits(config, layout):
            assert layout.tp == 4 or layout.ep > 1 or layout.etp > 1, layout
            continue
        for spec in ("local", "te"):
            for head in ("lm", "value"):
                for mtp in ("drop", "load"):
                    for fused in (False, True):
                        hf = dataclasses.replace(config, mtp=mtp, fused_experts=fused or config.fused_experts)
                        prove_complete(Sharding(hf, layout, spec=spec, head=head))  # type: ignore[arg-type]
                        proved += 1
    assert proved >= 16 * 7


def test_fewer_key_value_heads_than_ranks_cuts_a_group() -> None:
    # One group of (2 query + 2) heads * 6 rows over two ranks: the second holds key and value only.
    hf, layout = small_config(num_heads=2, num_kv_heads=1), LAYOUTS["tp2"]
    check_against_reference(hf, layout)
    planned = by_name(build_plan(Sharding(hf, layout), RankCoordinates(tp_rank=1)))
    names = [c.hf_name for c in planned["decoder.layers.0.self_attention.linear_qkv.weight"].copies]
    assert names == ["model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight"]


def by_name(planned: Iterable[ParamPlan]) -> dict[str, ParamPlan]:
    return {param.name: param for param in planned}


def test_a_rank_may_hold_nothing_but_padding() -> None:
    hf, layout = small_config(vocab_size=5), LAYOUTS["tp4"]
    assert padded_vocab_size(5, 4) == 8
    check_against_reference(hf, layout)
    copies = build_plan(Sharding(hf, layout), RankCoordinates(tp_rank=3))[0].copies
    assert [(c.hf_name, c.rows) for c in copies] == [(None, 2)]


def test_a_layout_that_does_not_fit_is_refused_with_every_reason() -> None:
    hf = small_config(num_heads=3, num_kv_heads=3, ffn_hidden_size=7, head_dim=2, num_layers=3)
    problems = check_layout(hf, LAYOUTS["tp2-pp2"])
    for word in ("num_attention_heads=3", "intermediate_size=7", "num_hidden_layers=3", "heads=3"):
        assert any(word in line for line in problems), (word, problems)
    with pytest.raises(UserErrors):
        prove_complete(Sharding(hf, LAYOUTS["tp2-pp2"]))


def test_experts_that_cannot_be_cut_are_refused() -> None:
    moe, ep4 = small_moe(), ParallelLayout(world_size=4, ep=4)
    assert check_layout(moe, ep4) == ["ep=4 does not divide the number of experts 6"]
    etp8 = ParallelLayout(world_size=8, etp=8)
    assert check_layout(moe, etp8) == ["etp=8 does not divide the experts' intermediate size 12"]
    assert "has no experts" in check_layout(small_config(), MORE_LAYOUTS["ep2"])[0]
    biased = parse_hf_config(TINY["gpt_oss"])
    assert "experts that have biases" in check_layout(biased, MORE_LAYOUTS["ep2-etp2"])[0]
    assert not check_layout(biased, MORE_LAYOUTS["ep2"])
    joint = dataclasses.replace(parse_hf_config(TINY["olmoe"]), num_kv_heads=2)
    assert "normed all together" in check_layout(joint, LAYOUTS["tp4"])[0]


def test_multi_token_prediction_is_dropped_by_name_or_loaded() -> None:
    hf = parse_hf_config(TINY["deepseek_v3"])
    dropped = ignored_tensors(hf, head="lm")
    ahead = "model.layers.4."
    for name in ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight", "input_layernorm.weight"):
        assert ahead + name in dropped
    assert ahead + "mlp.experts.7.down_proj.weight" in dropped
    assert not any(name.startswith(ahead) for name in hf_tensors(hf, head="lm"))
    loaded = dataclasses.replace(hf, mtp="load")
    repeated = {ahead + "embed_tokens.weight", ahead + "shared_head.head.weight"}
    assert {n for n in ignored_tensors(loaded, head="lm") if n.startswith(ahead)} - repeated == {
        ahead + "self_attn.rotary_emb.inv_freq"
    }
    assert repeated <= ignored_tensors(loaded, head="lm")
    assert set(mtp_tensors(hf)) == {n for n in hf_tensors(loaded, head="lm") if n.startswith(ahead)}


# The proof: a table with a fault is refused, and the fault is named.


def broken_rules(monkeypatch: pytest.MonkeyPatch, rules: Iterable[Rule]) -> None:
    monkeypatch.setitem(FAMILIES, "qwen3", dataclasses.replace(FAMILIES["qwen3"], rules=tuple(rules)))


def broken_shards(monkeypatch: pytest.MonkeyPatch, ending: str, change: Callable[[tuple[Copy, ...], int], Any]) -> None:
    """Change the copies of a rank's part of each parameter whose name ends so."""
    whole = plan.shard

    def shard(param: blocks.GlobalParam, parts: int, index: int) -> tuple[tuple[int, ...], tuple[Copy, ...]]:
        shape, copies = whole(param, parts, index)
        return shape, change(copies, index) if param.name.endswith(ending) else copies

    monkeypatch.setattr(plan, "shard", shard)


def lossy(copies: tuple[Copy, ...], index: int) -> tuple[Copy, ...]:
    return copies[:-1]


def shifted(copies: tuple[Copy, ...], index: int) -> tuple[Copy, ...]:
    """Another row on each rank but the first."""
    return tuple(copy._replace(src_row=copy.src_row + min(index, 1)) for copy in copies)


UP = Source("model.layers.{layer}.mlp.up_proj.weight", ("ffn", "hidden"))
TWICE = [dataclasses.replace(r, sources=(UP, UP)) if r.param.endswith("linear_fc1.weight") else r for r in DENSE]
QKV, FINAL = "linear_qkv.weight", "decoder.final_layernorm.weight"
# name -> what is wrong with the tables, the model and layout, and what the proof says
WRONG_TABLES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], HFConfig, str, list[str]]] = {
    "a tensor used twice": (
        lambda patch: broken_rules(patch, TWICE), small_config(), "tp2",
        ["model.layers.0.mlp.up_proj.weight rows 0..14 are taken twice"],
    ),
    "a parameter in two tables": (
        lambda patch: broken_rules(patch, (*DENSE, MLP[0])), small_config(), "pp2",
        ["decoder.layers.0.pre_mlp_layernorm.weight is planned 2 times",
         "model.layers.2.post_attention_layernorm.weight rows 0..10 are taken twice"],
    ),
    "lost rows": (
        lambda patch: broken_shards(patch, QKV, lossy), small_config(), "tp2",
        [f"tp_rank=1 pp_rank=0 vp_stage=0: decoder.layers.0.self_attention.{QKV} rows 18..24 are missed",
         "model.layers.3.self_attn.v_proj.weight rows 0..12 are missed"],
    ),
    "lost experts": (
        lambda patch: broken_shards(patch, "local_experts.3.linear_fc1.weight", lossy), small_moe(), "ep2",
        ["ep_rank=1 etp_rank=0 pp_rank=0 vp_stage=0: decoder.layers.0.mlp.experts.local_experts.1",
         "model.layers.3.mlp.experts.4.up_proj.weight rows 0..12 are missed"],
    ),
    "replicas that differ": (
        lambda patch: broken_shards(patch, FINAL, shifted), small_config(), "tp2", [f"{FINAL} is not that of rank 0"],
    ),
}  # fmt: skip


def faults_of(hf: HFConfig, layout: ParallelLayout) -> str:
    """What the proof says; proofs are kept, and the tests change what is proved."""
    proof._faults.cache_clear()
    with pytest.raises(UserErrors) as caught:
        prove_complete(Sharding(hf, layout))
    proof._faults.cache_clear()
    return str(caught.value)


@pytest.mark.parametrize("case", WRONG_TABLES)
def test_proof_names_what_is_wrong(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, hf, layout, expected = WRONG_TABLES[case]
    plant(monkeypatch)
    faults = faults_of(hf, ALL_LAYOUTS[layout])
    for fault in expected:
        assert fault in faults


@pytest.mark.parametrize(
    ("rectangles", "shape", "faults"),
    [
        ([(0, 4, 0, 2), (0, 4, 2, 6)], (4, 6), []),
        ([(0, 3, 0, 1), (3, 5, 0, 1)], (5,), []),
        ([(0, 2, 0, 3), (2, 4, 0, 3), (0, 4, 3, 6)], (2, 2, 6), []),
        ([], (4, 6), ["rows 0..4 are missed"]),
        ([(0, 4, 0, 2)], (4, 6), ["rows 0..4 columns 2..6 are missed"]),
        (
            [(0, 4, 0, 4), (2, 4, 3, 6)],
            (4, 6),
            ["rows 2..4 columns 3..4 are taken twice", "rows 0..2 columns 4..6 are missed"],
        ),
        ([(0, 5, 0, 6)], (4, 6), ["rows up to 5 lie outside its shape [4, 6]"]),
        ([(0, 4, 0, 7)], (4, 6), ["rows up to 4 columns 6..7 lie outside its shape [4, 6]"]),
    ],
)
def test_tiling_faults(rectangles: list[tuple[int, int, int, int]], shape: tuple[int, ...], faults: list[str]) -> None:
    """Gaps, overlaps and what lies outside, in words."""
    assert tiling_faults(tuple(rectangles), shape) == tuple(faults)
