"""The index map against a split written out head by head, its inverse, and the proof that it is complete."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mega_rl.converters.names import canonical_name, dialect_name, with_layer
from torch import Tensor

from mega_rl.converters import families
from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.blocks import Copy, matrix_shape
from mega_rl.converters.hf_config import parse_hf_config
from mega_rl.converters.plan import (
    Head,
    build_plan,
    check_layout,
    export_plan,
    hf_tensors,
    ignored_tensors,
    padded_vocab_size,
)
from mega_rl.converters.proof import prove_complete, tiling_faults
from mega_rl.errors import UserErrors
from mega_rl.parallel.layout import ParallelLayout
from tests.unit_tests.converters.fakes import LAYOUTS, State, hf_state, ranks, reference_params, small_config


def matrix(tensor: Tensor) -> Tensor:
    return tensor.view(matrix_shape(tuple(tensor.shape)))


def shard_by_plan(copies: Iterable[Copy], shape: tuple[int, ...], state: State) -> Tensor:
    """Applies copies one by one; what no copy writes stays NaN."""
    result = torch.full(shape, float("nan"))
    for c in copies:
        target = matrix(result)[c.dst_row : c.dst_row + c.rows, c.dst_col : c.dst_col + c.cols]
        if c.hf_name is None:
            target.zero_()
        else:
            source = matrix(state[c.hf_name])
            target.copy_(source[c.src_row : c.src_row + c.rows, c.src_col : c.src_col + c.cols])
    return result


def check_against_reference(hf: HFConfig, layout: ParallelLayout, *, head: Head = "lm", spec: str = "local") -> None:
    """load == reference split on every rank, export(load) == identity."""
    state = hf_state(hf, value_head=head == "value")
    held: dict[tuple[int, int, int, str], Tensor] = {}
    for at in ranks(layout):
        for vp_stage in range(layout.vpp):
            expected = reference_params(hf, state, layout, at, vp_stage, spec=spec)
            plan = build_plan(
                hf,
                layout,
                tp_rank=at.tp_rank,
                pp_rank=at.pp_rank,
                vp_stage=vp_stage,
                spec=spec,
                head=head,  # type: ignore[arg-type]
            )
            assert {param.name: param.shape for param in plan} == {n: tuple(t.shape) for n, t in expected.items()}
            for param in plan:
                found = shard_by_plan(param.copies, param.shape, state)
                assert torch.equal(found, expected[param.name]), (param.name, at)
                name = canonical_name(param.name, spec=spec)  # type: ignore[arg-type]
                held[at.tp_rank, at.pp_rank, vp_stage, name] = found
    exported = {}
    for param in export_plan(hf, layout, head=head):
        for name, shape, pieces in param.tensors:
            result = torch.full(shape, float("nan"))
            for tp_rank, c in pieces:
                shard = matrix(held[tp_rank, param.pp_rank, param.vp_stage, param.name])
                target = matrix(result)[c.src_row : c.src_row + c.rows, c.src_col : c.src_col + c.cols]
                target.copy_(shard[c.dst_row : c.dst_row + c.rows, c.dst_col : c.dst_col + c.cols])
            assert name not in exported, name
            exported[name] = result
    assert list(exported) == list(hf_tensors(hf, head=head))
    assert exported.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(exported[name], tensor), name
    prove_complete(hf, layout, spec=spec, head=head)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("spec", ["local", "te"])
def test_every_layout_against_the_reference(layout: ParallelLayout, tied: bool, spec: str) -> None:
    check_against_reference(small_config(tied=tied), layout, spec=spec)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_value_head(layout: ParallelLayout) -> None:
    check_against_reference(small_config(tied=True), layout, head="value")


def test_biases() -> None:
    check_against_reference(small_config(family="qwen2", qkv_bias=True, qk_norm=False), LAYOUTS["tp2-pp2"])
    both = small_config(family="llama", qkv_bias=True, linear_bias=True, qk_norm=False)
    check_against_reference(both, LAYOUTS["tp2-pp2"])


@st.composite
def cases(draw: st.DrawFn) -> tuple[HFConfig, ParallelLayout]:
    """A model and a layout that fits it."""
    tp, pp, vpp = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    groups, per_group = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 2, 3]))
    vpp = vpp if pp > 1 else 1
    linear_bias = draw(st.booleans())
    hf = small_config(
        family=draw(st.sampled_from(["qwen2", "qwen3", "llama"])),
        num_layers=pp * vpp * draw(st.sampled_from([1, 2])),
        num_heads=groups * per_group,
        num_kv_heads=groups,
        head_dim=2 * draw(st.integers(1, 4)),
        hidden_size=draw(st.integers(1, 9)),
        ffn_hidden_size=tp * draw(st.integers(1, 5)),
        vocab_size=draw(st.integers(1, 20)),
        tied=draw(st.booleans()),
        linear_bias=linear_bias,
        qkv_bias=linear_bias or draw(st.booleans()),
        qk_norm=draw(st.booleans()),
    )
    return hf, ParallelLayout(world_size=tp * pp, tp=tp, pp=pp, vpp=vpp)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_shard_then_unshard_is_the_identity(case: tuple[HFConfig, ParallelLayout]) -> None:
    hf, layout = case
    if check_layout(hf, layout):
        with pytest.raises(UserErrors):
            build_plan(hf, layout, tp_rank=0, pp_rank=0)
        return
    check_against_reference(hf, layout)


def test_fewer_key_value_heads_than_ranks_cuts_a_group() -> None:
    # One group of (2 query + 2) heads * 6 rows over two ranks: the second holds key and value only.
    hf, layout = small_config(num_heads=2, num_kv_heads=1), LAYOUTS["tp2"]
    check_against_reference(hf, layout)
    plan = {p.name: p for p in build_plan(hf, layout, tp_rank=1, pp_rank=0)}
    names = [c.hf_name for c in plan["decoder.layers.0.self_attention.linear_qkv.weight"].copies]
    assert names == ["model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight"]


def test_a_rank_may_hold_nothing_but_padding() -> None:
    hf, layout = small_config(vocab_size=5), LAYOUTS["tp4"]
    assert padded_vocab_size(5, 4) == 8
    check_against_reference(hf, layout)
    copies = build_plan(hf, layout, tp_rank=3, pp_rank=0)[0].copies
    assert [(c.hf_name, c.rows) for c in copies] == [(None, 2)]


def test_a_larger_padding_is_cut_off_on_export() -> None:
    hf, layout = small_config(), LAYOUTS["tp2"]
    prove_complete(hf, layout, padded_vocab=64)
    assert build_plan(hf, layout, tp_rank=0, pp_rank=0, padded_vocab=64)[0].shape == (32, 10)
    shapes = {name: shape for p in export_plan(hf, layout, padded_vocab=64) for name, shape, _ in p.tensors}
    assert shapes["model.embed_tokens.weight"] == (13, 10)


def test_a_layout_that_does_not_fit_is_refused_with_every_reason() -> None:
    hf = small_config(num_heads=3, num_kv_heads=3, ffn_hidden_size=7, head_dim=2, num_layers=3)
    problems = check_layout(hf, LAYOUTS["tp2-pp2"], padded_vocab=13)
    for word in (
        "num_attention_heads=3",
        "intermediate_size=7",
        "padded vocabulary=13",
        "num_hidden_layers=3",
        "heads=3",
    ):
        assert any(word in line for line in problems), (word, problems)
    assert any("smaller than vocab_size=13" in line for line in check_layout(hf, LAYOUTS["one"], padded_vocab=12))
    with pytest.raises(UserErrors):
        prove_complete(hf, LAYOUTS["tp2-pp2"])


def test_ignored_names() -> None:
    assert "lm_head.weight" in ignored_tensors(small_config(tied=True), head="lm")
    assert "lm_head.weight" in ignored_tensors(small_config(), head="value")
    assert "lm_head.weight" not in ignored_tensors(small_config(), head="lm")
    assert "model.layers.3.self_attn.rotary_emb.inv_freq" in ignored_tensors(small_config(), head="lm")


def test_export_order_does_not_depend_on_the_layout() -> None:
    hf = small_config()
    orders = [[name for p in export_plan(hf, layout) for name, _, _ in p.tensors] for layout in LAYOUTS.values()]
    assert all(order == orders[0] for order in orders)


# The proof: a table with a fault is refused, and the fault is named.


def rules_with(monkeypatch: pytest.MonkeyPatch, rules: Iterable[families.Rule]) -> None:
    monkeypatch.setitem(families.FAMILIES, "qwen3", dataclasses.replace(families.QWEN3, rules=tuple(rules)))


def faults_of(hf: HFConfig, layout: ParallelLayout) -> str:
    with pytest.raises(UserErrors) as caught:
        prove_complete(hf, layout)
    return str(caught.value)


def test_proof_finds_a_tensor_used_twice_and_one_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    up = families.Source("model.layers.{layer}.mlp.up_proj.weight", ("ffn", "hidden"))
    rules = [
        dataclasses.replace(rule, sources=(up, up)) if rule.param.endswith("linear_fc1.weight") else rule
        for rule in families.DENSE
    ]
    rules_with(monkeypatch, rules)
    faults = faults_of(small_config(), LAYOUTS["tp2"])
    assert "model.layers.0.mlp.up_proj.weight rows 0..14 are taken twice" in faults


def test_proof_finds_a_parameter_in_two_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    rules_with(monkeypatch, (*families.DENSE, families.MLP[0]))
    faults = faults_of(small_config(), LAYOUTS["pp2"])
    assert "decoder.layers.0.pre_mlp_layernorm.weight is planned 2 times" in faults
    assert "model.layers.2.post_attention_layernorm.weight rows 0..10 are taken twice" in faults


def test_proof_finds_lost_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from mega_rl.converters import plan

    whole = plan.shard

    def lossy(param: object, tp: int, tp_rank: int) -> object:
        shape, copies = whole(param, tp, tp_rank)  # type: ignore[arg-type]
        return shape, copies[:-1] if param.name.endswith("linear_qkv.weight") else copies  # type: ignore[attr-defined]

    monkeypatch.setattr(plan, "shard", lossy)
    faults = faults_of(small_config(), LAYOUTS["tp2"])
    where = "tp_rank=1 pp_rank=0 vp_stage=0: decoder.layers.0.self_attention.linear_qkv.weight"
    assert f"{where} rows 18..24 are missed" in faults
    assert "model.layers.3.self_attn.v_proj.weight rows 0..12 are missed" in faults


def test_proof_finds_replicas_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    from mega_rl.converters import plan

    whole = plan.shard

    def shifted(param: object, tp: int, tp_rank: int) -> object:
        shape, copies = whole(param, tp, tp_rank)  # type: ignore[arg-type]
        if param.name == "decoder.final_layernorm.weight" and tp_rank:  # type: ignore[attr-defined]
            copies = tuple(c._replace(src_row=c.src_row + 1) for c in copies)
        return shape, copies

    monkeypatch.setattr(plan, "shard", shifted)
    assert "decoder.final_layernorm.weight is not that of tp_rank=0" in faults_of(small_config(), LAYOUTS["tp2"])


def test_tiling_faults() -> None:
    assert tiling_faults([(0, 4, 0, 2), (0, 4, 2, 6)], (4, 6)) == []
    assert tiling_faults([(0, 3, 0, 1), (3, 5, 0, 1)], (5,)) == []
    assert tiling_faults([], (4, 6)) == ["rows 0..4 are missed"]
    assert tiling_faults([(0, 4, 0, 2)], (4, 6)) == ["rows 0..4 columns 2..6 are missed"]
    assert tiling_faults([(0, 4, 0, 4), (2, 4, 3, 6)], (4, 6)) == [
        "rows 2..4 columns 3..4 are taken twice",
        "rows 0..2 columns 4..6 are missed",
    ]
    assert tiling_faults([(0, 5, 0, 6)], (4, 6)) == ["rows up to 5 lie outside its shape [4, 6]"]
    assert tiling_faults([(0, 4, 0, 7)], (4, 6)) == ["rows up to 4 columns 6..7 lie outside its shape [4, 6]"]
    assert tiling_faults([(0, 2, 0, 3), (2, 4, 0, 3), (0, 4, 3, 6)], (2, 2, 6)) == []


def test_names() -> None:
    te = "decoder.layers.7.self_attention.linear_qkv.layer_norm_weight"
    assert dialect_name("decoder.layers.7.input_layernorm.weight", spec="te") == te
    assert canonical_name(te, spec="te") == "decoder.layers.7.input_layernorm.weight"
    assert dialect_name(te, spec="local") == canonical_name(te, spec="local") == te
    assert with_layer(te, 0) == "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"


def test_planning_a_36_layer_model_over_8_ranks_is_fast() -> None:
    hf = parse_hf_config(
        {
            "model_type": "qwen3",
            "num_hidden_layers": 36,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 12288,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
        }
    )
    layout = ParallelLayout(world_size=8, tp=8)
    times = []
    for _ in range(3):
        start = time.process_time()
        prove_complete(hf, layout)
        times.append(time.process_time() - start)
    # About 40 ms on one core of 2025; ten times that would mean work per element or quadratic work.
    assert min(times) < 0.4
