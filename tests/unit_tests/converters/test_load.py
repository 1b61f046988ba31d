"""Loading into stand-ins for Megatron-Core chunks, one process playing every rank in turn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.hf.config import read_hf_config
from mega_rl.converters.live.load import LoadReport, load_hf, weights_of
from mega_rl.converters.plan.parameters import VALUE_HEADS
from mega_rl.converters.plan.ranks import build_plan
from mega_rl.converters.plan.sharding import Head, Sharding, Spec
from mega_rl.converters.safetensors.reader import CheckpointReader
from mega_rl.errors import UserErrors
from mega_rl.parallel.layout import ParallelLayout, RankCoordinates
from tests.unit_tests.converters.fakes import (
    LAYOUTS,
    State,
    chunks_of_rank,
    hf_state,
    planned_chunks,
    ranks,
    reference_params,
    small_config,
)
from tests.unit_tests.converters.random_checkpoints import write_random

FIRST = RankCoordinates(tp_rank=0, cp_rank=0, dp_rank=0, pp_rank=0)


def write(directory: Path, state: State) -> Path:
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def load_one(path: Path, hf: HFConfig, state: State, *, head: Head = "lm") -> LoadReport:
    """Loads a single rank whose model is that of `state`."""
    layout = LAYOUTS["one"]
    chunks = chunks_of_rank(hf, state, layout, FIRST)
    return load_hf(chunks, path, sharding=Sharding(hf, layout, head=head), coordinates=FIRST)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("spec", ["local", "te"])
def test_every_rank_gets_its_slices(tmp_path: Path, layout: ParallelLayout, tied: bool, spec: Spec) -> None:
    hf = small_config(tied=tied)
    state = hf_state(hf)
    write(tmp_path, state)
    sharding = Sharding(hf, layout, spec)
    for at in ranks(layout):
        chunks = chunks_of_rank(hf, state, layout, at, spec=spec)
        report = load_hf(chunks, tmp_path, sharding=sharding, coordinates=at)
        for vp_stage, chunk in enumerate(chunks):
            expected = reference_params(hf, state, layout, at, vp_stage, spec=spec)
            for name, param in chunk.named_parameters():
                assert torch.equal(param, expected[name]), (name, at)
        plans = [param for stage in range(layout.vpp) for param in build_plan(sharding, at, vp_stage=stage)]
        share = sum(c.rows * c.cols for param in plans for c in param.copies if c.hf_name is not None)
        assert report.bytes_read == 4 * share  # its own share, of column-cut tensors too; zero rows cost nothing
        assert (report.kept_init, report.ignored) == ((), ())


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
    assert f"{file}: model.layers.4.input_layernorm.weight [10] is not part of" in text


# Heads.


@pytest.mark.parametrize("row", [0, 12])
def test_tied_checkpoint_with_another_head_is_refused(tmp_path: Path, row: int) -> None:
    hf = small_config(tied=True)
    state = hf_state(hf)
    other = state["model.embed_tokens.weight"].clone()
    other[row] *= 1.25
    write(tmp_path, state | {"lm_head.weight": other})
    with pytest.raises(UserErrors, match=r"lm_head\.weight .* differs from model\.embed.*set it to false.*delete"):
        load_one(tmp_path, hf, state)


@pytest.mark.parametrize("layout", [LAYOUTS["one"], LAYOUTS["tp2-pp2"]], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_value_head_from_a_language_model_keeps_its_init(tmp_path: Path, layout: ParallelLayout, tied: bool) -> None:
    hf = small_config(tied=tied)
    write(tmp_path, hf_state(hf))
    with_head = hf_state(hf, value_head=True)
    for at in ranks(layout):
        chunks = chunks_of_rank(hf, with_head, layout, at, fill=3.0)
        report = load_hf(chunks, tmp_path, sharding=Sharding(hf, layout, head="value"), coordinates=at)
        last = at.pp_rank == layout.pp - 1
        assert report.kept_init == (("output_layer.weight",) if last else ())
        assert report.ignored == (() if tied else ("lm_head.weight",))
        if last:
            assert torch.equal(chunks[-1].get_parameter("output_layer.weight"), torch.full((1, 10), 3.0))


@pytest.mark.parametrize("name", VALUE_HEADS)
def test_every_name_of_a_value_head(tmp_path: Path, name: str) -> None:
    hf = small_config()
    state = hf_state(hf, value_head=True)
    head = state["score.weight"]
    on_disk = {key: value for key, value in state.items() if key != "score.weight"} | {name: head}
    write(tmp_path, on_disk)
    for layout in (LAYOUTS["one"], LAYOUTS["tp2"]):
        for at in ranks(layout):
            chunks = chunks_of_rank(hf, state, layout, at)
            report = load_hf(chunks, tmp_path, sharding=Sharding(hf, layout, head="value"), coordinates=at)
            assert (report.kept_init, report.ignored) == ((), ())
            assert torch.equal(chunks[0].get_parameter("output_layer.weight"), head)


def test_the_bias_of_a_value_head_must_be_zero(tmp_path: Path) -> None:
    hf = small_config()
    state = hf_state(hf, value_head=True)
    on_disk = {key: value for key, value in state.items() if key != "score.weight"}
    on_disk |= {"v_head.summary.weight": state["score.weight"], "v_head.summary.bias": torch.zeros(1)}
    write(tmp_path, on_disk)
    assert load_one(tmp_path, hf, state, head="value").kept_init == ()
    write(tmp_path, on_disk | {"v_head.summary.bias": torch.full((1,), 0.25)})
    with pytest.raises(UserErrors, match=r"v_head\.summary\.bias is not zero"):
        load_one(tmp_path, hf, state, head="value")


# Experts and 8-bit blocks.


def test_a_correction_bias_stays_float32_in_a_bfloat16_model(tmp_path: Path) -> None:
    source = write_random(tmp_path / "hf", "deepseek_v3", num_nextn_predict_layers=0)
    sharding = Sharding(read_hf_config(source))
    chunks = planned_chunks(sharding, FIRST)
    load_hf(chunks, source, sharding=sharding, coordinates=FIRST)
    with CheckpointReader(source) as reader:
        expected = reader.read("model.layers.2.mlp.gate.e_score_correction_bias")
    bias = chunks[0].get_buffer("decoder.layers.2.mlp.router.expert_bias")
    assert bias.dtype == torch.float32
    assert torch.equal(bias, expected)
    assert not torch.equal(bias, bias.bfloat16().float())


def quantise(folder: Path) -> dict[str, torch.Tensor]:
    """Rewrites every projection as 8-bit blocks with scales; the tensors as they must come out."""
    with CheckpointReader(folder) as reader:
        tensors = {name: reader.read(name) for name in reader.tensors}
    for file in folder.glob("model*"):
        file.unlink()
    on_disk, expected = {}, {}
    for name, tensor in tensors.items():
        on_disk[name] = expected[name] = tensor
        if name.endswith("proj.weight"):
            rows, cols = tensor.shape
            scale = torch.rand(-(-rows // 128), -(-cols // 128)) + 0.5
            full = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]
            on_disk[name] = (tensor.float() / full).to(torch.float8_e4m3fn)
            on_disk[name + "_scale_inv"] = scale
            expected[name] = (on_disk[name].float() * full).bfloat16()
    save_file(on_disk, folder / "model.safetensors")
    return expected


def fp8_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("tp", [1, 2])
def test_8_bit_blocks_load_as_their_scaled_values(tmp_path: Path, tp: int) -> None:
    """Hidden size 200 and width 168: every edge tile is ragged, and TP cuts through tiles."""
    sizes = {"hidden_size": 200, "moe_intermediate_size": 168, "num_nextn_predict_layers": 0}
    source = write_random(tmp_path / "hf", "deepseek_v3", **sizes)
    expected = quantise(source)
    layout = ParallelLayout(world_size=tp, tp=tp, etp=tp)
    unannounced = Sharding(read_hf_config(source), layout)
    with pytest.raises(UserErrors, match=r"are fp8 with scales, but config\.json has no fp8"):
        load_hf(planned_chunks(unannounced, FIRST), source, sharding=unannounced, coordinates=FIRST)
    fp8_config(source)
    plain = tmp_path / "plain"
    plain.mkdir()
    save_file(expected, plain / "model.safetensors")
    sharding = Sharding(read_hf_config(source), layout)
    for at in ranks(layout):
        loaded, reference = planned_chunks(sharding, at), planned_chunks(sharding, at)
        report = load_hf(loaded, source, sharding=sharding, coordinates=at)
        load_hf(reference, plain, sharding=sharding, coordinates=at)
        for a, b in zip(loaded, reference, strict=True):
            actual = weights_of(a)
            assert all(torch.equal(actual[name], value) for name, value in weights_of(b).items())
        assert report.bytes_read > 0


def test_8_bit_values_without_their_scale_are_refused(tmp_path: Path) -> None:
    source = write_random(tmp_path / "hf", "deepseek_v3", num_nextn_predict_layers=0)
    quantise(source)
    fp8_config(source)
    with CheckpointReader(source) as reader:
        names = sorted(name for name, info in reader.tensors.items() if info.packed is not None)
    tensors = load_file(source / "model.safetensors")
    lost, short, half = names[0], names[1], names[2]
    del tensors[lost + "_scale_inv"]
    save_file(tensors, source / "model.safetensors")
    sharding = Sharding(read_hf_config(source))
    with pytest.raises(UserErrors, match=f"{lost} has dtype F8_E4M3 and no {lost}_scale_inv"):
        load_hf(planned_chunks(sharding, FIRST), source, sharding=sharding, coordinates=FIRST)
    tensors[short + "_scale_inv"] = torch.ones(3, 1)
    tensors[half + "_scale_inv"] = tensors[half + "_scale_inv"].half()
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(UserErrors) as caught:
        CheckpointReader(source)
    assert len(caught.value.problems) == 2
    assert any(f"{short}_scale_inv is float32 [3, 1]" in problem for problem in caught.value.problems)
    assert any(f"{half}_scale_inv is float16 [1, 1]" in problem for problem in caught.value.problems)


# Our own bugs.


def test_plan_and_model_must_agree(tmp_path: Path) -> None:
    hf = small_config()
    state = hf_state(hf)
    write(tmp_path, state)

    def load(layout: str, spec: Spec = "local") -> None:
        load_hf(chunks, tmp_path, sharding=Sharding(hf, LAYOUTS[layout], spec), coordinates=FIRST)

    chunks = chunks_of_rank(hf, state, LAYOUTS["one"], FIRST)
    with pytest.raises(AssertionError, match="layer_norm_weight is in the plan only"):
        load("one", "te")
    chunks[0].register_parameter("extra", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(AssertionError, match="extra is in the model only"):
        load("one")
    chunks = chunks_of_rank(hf, state, LAYOUTS["tp2-pp2-vpp2"], FIRST)[:1]
    with pytest.raises(AssertionError, match="1 chunks"):
        load("tp2-pp2-vpp2")
    chunks = chunks_of_rank(hf, state, LAYOUTS["pp2"], FIRST)
    for layer, number in zip(chunks[0].get_submodule("decoder.layers").children(), (3, 4), strict=True):
        layer.layer_number = number  # type: ignore[assignment]
    with pytest.raises(AssertionError, match=r"numbered \[3, 4\]"):
        load("pp2")
