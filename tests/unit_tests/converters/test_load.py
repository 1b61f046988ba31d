"""Loading into stand-ins for Megatron-Core chunks, one process playing every rank in turn."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.load import LoadReport, load_hf
from mega_rl.converters.plan import build_plan
from mega_rl.errors import UserError, UserErrors
from mega_rl.parallel.layout import ParallelLayout, RankCoordinates
from tests.unit_tests.converters.fakes import (
    LAYOUTS,
    State,
    chunks_of_rank,
    hf_state,
    ranks,
    reference_params,
    small_config,
)

FIRST = RankCoordinates(tp_rank=0, cp_rank=0, dp_rank=0, pp_rank=0)


def write(directory: Path, state: State) -> Path:
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def load_one(path: Path, hf: HFConfig, state: State, *, head: str = "lm") -> LoadReport:
    """Loads a single rank whose model is that of `state`."""
    layout = LAYOUTS["one"]
    chunks = chunks_of_rank(hf, state, layout, FIRST)
    return load_hf(chunks, path, hf=hf, layout=layout, coordinates=FIRST, spec="local", head=head)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("spec", ["local", "te"])
def test_every_rank_gets_its_slices(tmp_path: Path, layout: ParallelLayout, tied: bool, spec: str) -> None:
    hf = small_config(tied=tied)
    state = hf_state(hf)
    write(tmp_path, state)
    for at in ranks(layout):
        chunks = chunks_of_rank(hf, state, layout, at, spec=spec)
        report = load_hf(chunks, tmp_path, hf=hf, layout=layout, coordinates=at, spec=spec)  # type: ignore[arg-type]
        for vp_stage, chunk in enumerate(chunks):
            expected = reference_params(hf, state, layout, at, vp_stage, spec=spec)
            for name, param in chunk.named_parameters():
                assert torch.equal(param, expected[name]), (name, at)
        assert report.num_params == sum(len(list(chunk.parameters())) for chunk in chunks)
        assert (report.kept_init, report.ignored) == ((), ())


def test_values_are_cast_to_the_parameters_dtype(tmp_path: Path) -> None:
    hf, layout = small_config(), LAYOUTS["one"]
    state = hf_state(hf, dtype=torch.bfloat16)
    write(tmp_path, state)
    chunks = chunks_of_rank(hf, {name: t.float() for name, t in state.items()}, layout, FIRST)
    load_hf(chunks, tmp_path, hf=hf, layout=layout, coordinates=FIRST, spec="local")
    embedding = chunks[0].get_parameter("embedding.word_embeddings.weight")
    assert embedding.dtype == torch.float32
    assert embedding.requires_grad
    assert torch.equal(embedding, state["model.embed_tokens.weight"].float())


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_bytes_read(tmp_path: Path, layout: ParallelLayout) -> None:
    """A rank reads its share of row-cut and whole parameters exactly, and all of a column-cut tensor.

    Only copies of rows count: zero rows cost nothing. The bound for the first kind is equality, not 1.05.
    """
    hf = small_config()
    write(tmp_path, hf_state(hf))
    for at in ranks(layout):
        share = whole = 0
        for vp_stage in range(layout.vpp):
            for param in build_plan(hf, layout, tp_rank=at.tp_rank, pp_rank=at.pp_rank, vp_stage=vp_stage):
                elements = sum(c.rows * c.cols for c in param.copies if c.hf_name is not None)
                column_cut = param.name.endswith(("linear_proj.weight", "linear_fc2.weight"))
                share += 0 if column_cut else elements
                whole += elements * layout.tp if column_cut else 0
        chunks = chunks_of_rank(hf, hf_state(hf), layout, at)
        report = load_hf(chunks, tmp_path, hf=hf, layout=layout, coordinates=at, spec="local")
        assert report.bytes_read == 4 * (share + whole)


def test_reads_are_coalesced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf = small_config()
    state = hf_state(hf)
    write(tmp_path, state)
    import os

    calls = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, *rest: (calls.append(rest[1]), preadv(fd, *rest))[1])
    load_one(tmp_path, hf, state)
    # One read per tensor of the checkpoint, although q, k and v go to as many places as there are heads.
    assert len(calls) == len(state)


# Checkpoints that do not fit.


def test_missing_unexpected_and_misshaped_tensors_are_one_error(tmp_path: Path) -> None:
    hf = small_config()
    state = hf_state(hf)
    damaged = dict(state)
    del damaged["model.layers.2.self_attn.k_proj.weight"]
    del damaged["lm_head.weight"]
    damaged["model.layers.0.mlp.up_proj.weight"] = torch.zeros(27, 10)
    damaged["model.norm.weight"] = torch.zeros(10, dtype=torch.int8)
    damaged["model.layers.4.input_layernorm.weight"] = torch.zeros(10)
    write(tmp_path, damaged)
    with pytest.raises(UserErrors) as caught:
        load_one(tmp_path, hf, state)
    text = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 5
    file = str(tmp_path / "model.safetensors")
    assert "model.layers.2.self_attn.k_proj.weight is missing, expected shape [12, 10]" in text
    assert "lm_head.weight is missing" in text
    assert "tie_word_embeddings" in text
    assert f"{file}: model.layers.0.mlp.up_proj.weight has shape [27, 10], config.json asks for [28, 10]" in text
    assert "model.norm.weight has dtype I8" in text
    assert f"{file}: model.layers.4.input_layernorm.weight [10] is no part of" in text


def test_errors_are_the_same_on_every_rank(tmp_path: Path) -> None:
    hf, layout = small_config(), LAYOUTS["tp2-pp2"]
    state = hf_state(hf)
    write(tmp_path, {name: t for name, t in state.items() if "layers.3" not in name})
    messages = set()
    for at in ranks(layout):
        with pytest.raises(UserErrors) as caught:
            load_hf(chunks_of_rank(hf, state, layout, at), tmp_path, hf=hf, layout=layout, coordinates=at, spec="local")
        messages.add(str(caught.value))
    assert len(messages) == 1


def test_truncated_file_and_missing_shard(tmp_path: Path) -> None:
    hf = small_config()
    state = hf_state(hf)
    file = write(tmp_path, state) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match="truncated"):
        load_one(tmp_path, hf, state)
    file.unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(UserError, match="no such file"):
        load_one(tmp_path, hf, state)


def test_a_model_that_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    hf, layout = small_config(), ParallelLayout(world_size=3, tp=3)
    with pytest.raises(UserErrors, match="tp=3 does not divide num_attention_heads=4"):
        load_hf([], tmp_path, hf=hf, layout=layout, coordinates=FIRST, spec="local")


# Heads.


def test_tied_checkpoint_that_ships_a_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hf = small_config(tied=True)
    state = hf_state(hf)
    write(tmp_path, state | {"lm_head.weight": torch.full((13, 10), 7.0)})
    with caplog.at_level(logging.INFO):
        report = load_one(tmp_path, hf, state)
    assert report.ignored == ("lm_head.weight",)
    assert "lm_head.weight" in caplog.text


def test_old_buffers_are_left_aside(tmp_path: Path) -> None:
    hf = small_config(family="llama", qk_norm=False)
    state = hf_state(hf)
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(3) for i in range(4)}
    write(tmp_path, state | buffers)
    assert load_one(tmp_path, hf, state).ignored == tuple(sorted(buffers))


@pytest.mark.parametrize("layout", [LAYOUTS["one"], LAYOUTS["tp2-pp2"]], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_value_head_from_a_language_model_keeps_its_init(tmp_path: Path, layout: ParallelLayout, tied: bool) -> None:
    hf = small_config(tied=tied)
    write(tmp_path, hf_state(hf))
    with_head = hf_state(hf, value_head=True)
    for at in ranks(layout):
        chunks = chunks_of_rank(hf, with_head, layout, at, fill=3.0)
        report = load_hf(chunks, tmp_path, hf=hf, layout=layout, coordinates=at, spec="local", head="value")
        last = at.pp_rank == layout.pp - 1
        assert report.kept_init == (("output_layer.weight",) if last else ())
        assert report.ignored == (() if tied else ("lm_head.weight",))
        if last:
            assert torch.equal(chunks[-1].get_parameter("output_layer.weight"), torch.full((1, 10), 3.0))


def test_value_head_from_a_reward_model(tmp_path: Path) -> None:
    hf = small_config()
    state = hf_state(hf, value_head=True)
    write(tmp_path, state)
    layout = LAYOUTS["tp2-pp2"]
    for at in ranks(layout):
        chunks = chunks_of_rank(hf, state, layout, at)
        report = load_hf(chunks, tmp_path, hf=hf, layout=layout, coordinates=at, spec="local", head="value")
        assert report.kept_init == ()
        if at.pp_rank == 1:
            assert torch.equal(chunks[0].get_parameter("output_layer.weight"), state["score.weight"])


def test_a_score_of_several_labels_is_left_aside(tmp_path: Path) -> None:
    hf = small_config()
    state = hf_state(hf, value_head=True)
    write(tmp_path, state | {"score.weight": torch.zeros(5, 10)})
    report = load_one(tmp_path, hf, state, head="value")
    assert (report.kept_init, report.ignored) == (("output_layer.weight",), ("score.weight",))


# Our own bugs.


def test_plan_and_model_must_agree(tmp_path: Path) -> None:
    hf, layout = small_config(), LAYOUTS["one"]
    state = hf_state(hf)
    write(tmp_path, state)
    chunks = chunks_of_rank(hf, state, layout, FIRST)
    with pytest.raises(AssertionError, match="layer_norm_weight is in the plan only"):
        load_hf(chunks, tmp_path, hf=hf, layout=layout, coordinates=FIRST, spec="te")
    chunks[0].register_parameter("extra", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(AssertionError, match="extra is in the model only"):
        load_hf(chunks, tmp_path, hf=hf, layout=layout, coordinates=FIRST, spec="local")


def test_wrong_layer_numbers_are_found(tmp_path: Path) -> None:
    hf, layout = small_config(), LAYOUTS["pp2"]
    state = hf_state(hf)
    write(tmp_path, state)
    chunks = chunks_of_rank(hf, state, layout, FIRST)
    for layer, number in zip(chunks[0].get_submodule("decoder.layers").children(), (3, 4), strict=True):
        layer.layer_number = number  # type: ignore[assignment]
    with pytest.raises(AssertionError, match=r"numbered \[3, 4\]"):
        load_hf(chunks, tmp_path, hf=hf, layout=layout, coordinates=FIRST, spec="local")


def test_wrong_number_of_chunks_is_found(tmp_path: Path) -> None:
    hf, layout = small_config(), LAYOUTS["tp2-pp2-vpp2"]
    state = hf_state(hf)
    write(tmp_path, state)
    chunks = chunks_of_rank(hf, state, layout, FIRST)
    with pytest.raises(AssertionError, match="1 chunks"):
        load_hf(chunks[:1], tmp_path, hf=hf, layout=layout, coordinates=FIRST, spec="local")


def test_a_tied_model_after_an_untied_one(tmp_path: Path) -> None:
    # Families are shared tables: loading one kind must leave no trace for the other.
    for number, tied in enumerate([True, False, True]):
        hf = dataclasses.replace(small_config(), tied=tied)
        state = hf_state(hf, seed=number)
        folder = tmp_path / str(number)
        folder.mkdir()
        assert load_one(write(folder, state), hf, state).ignored == ()
