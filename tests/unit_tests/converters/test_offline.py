"""Conversion without a model: round trips of every family and layout, interruptions, bad inputs."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from mega_rl.converters.hf.config import read_hf_config
from mega_rl.converters.live import copying
from mega_rl.converters.offline import convert as offline
from mega_rl.converters.offline import writing
from mega_rl.converters.offline.checkpoint import open_checkpoint, read_manifest
from mega_rl.converters.offline.compare import compare, round_trip
from mega_rl.converters.offline.convert import ExportOptions, export_checkpoint, import_hf
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.converters.safetensors.reader import CheckpointReader
from mega_rl.converters.safetensors.writer import write_checkpoint
from mega_rl.errors import UserError, UserErrors
from tests.helpers.distributed import run_ranks
from tests.unit_tests.converters.random_checkpoints import contents, layouts_of, write_random
from tests.unit_tests.converters.tiny_configs import TINY


def peak_growth(rank: int, verb: str, source: str, target: str) -> int:
    """Return the bytes by which a conversion raises the peak of this process's memory."""
    # What getrusage calls the peak is inherited from the parent process; this one starts anew.
    Path("/proc/self/clear_refs").write_text("5")
    before = _peak()
    if verb == "export":
        export_checkpoint(source, target)
    else:
        import_hf(source, target)
    return _peak() - before


def _peak() -> int:
    """Return the bytes of memory at its largest."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024


SMALL_SHARDS = ExportOptions(shard_bytes=60_000)


def assert_same_weights(first: Path, second: Path) -> None:
    """Names, dtypes, shapes and every bit agree, and config.json, tokenizer and templates byte for byte."""
    with CheckpointReader(first) as a, CheckpointReader(second) as b:
        comparison = compare(a, b)
    assert comparison.equal, comparison
    copied = [{n: c for n, c in contents(folder).items() if "safetensors" not in n} for folder in (first, second)]
    assert copied[0] == copied[1]
    assert "config.json" in copied[0]


def rewritten(source: Path, target: Path, **changed: torch.Tensor) -> Path:
    """Write a checkpoint with some tensors changed."""
    with CheckpointReader(source) as reader:
        state = {name: reader.read(name) for name in reader.tensors}
    write_checkpoint(target, (state | changed).items(), files={"config.json": source / "config.json"})
    return target


@pytest.mark.parametrize("family", TINY)
def test_checkpoint_comes_back_bit_for_bit(family: str, tmp_path: Path) -> None:
    """From disk through a distributed checkpoint, and in memory through every layout."""
    source = write_random(tmp_path / "hf", family)
    assert not import_hf(source, tmp_path / "dist", mtp="load").absent
    export_checkpoint(tmp_path / "dist", tmp_path / "back", options=SMALL_SHARDS)
    assert_same_weights(source, tmp_path / "back")
    with CheckpointReader(source) as reader:
        hf = replace(read_hf_config(source), mtp="load")
        for name, layout in layouts_of(family).items():
            for spec in ("te", "local") if name == "tp2-pp2" else ("local",):
                sharding = Sharding(hf, layout, spec=spec)  # type: ignore[arg-type]
                assert round_trip(reader, sharding) == (len(reader.tensors), ()), name


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_large_tensors_are_written_in_pieces(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows at a time; a buffer of less than a tensor, shared by four threads."""
    source = write_random(tmp_path / "hf", family)
    import_hf(source, tmp_path / "whole", mtp="load")
    monkeypatch.setattr(writing, "PIECE_BYTES", 500)
    monkeypatch.setattr(writing, "BUFFER_BYTES", 700)
    monkeypatch.setattr(copying, "STAGING_BYTES", 300)
    import_hf(source, tmp_path / "pieces", mtp="load", jobs=4)
    assert contents(tmp_path / "pieces") == contents(tmp_path / "whole")
    export_checkpoint(tmp_path / "pieces", tmp_path / "back", options=SMALL_SHARDS, jobs=4)
    assert_same_weights(source, tmp_path / "back")


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "mixtral"])
def test_fused_and_single_experts_are_equal_parameters(family: str, tmp_path: Path) -> None:
    single = write_random(tmp_path / "single", family)
    import_hf(single, tmp_path / "a", mtp="load")
    export_checkpoint(tmp_path / "a", tmp_path / "fused", options=ExportOptions(experts="fused"))
    with CheckpointReader(tmp_path / "fused") as reader:
        assert any(len(info.shape) == 3 for info in reader.tensors.values())
    import_hf(tmp_path / "fused", tmp_path / "b", mtp="load")
    chunks = [{n: c for n, c in contents(tmp_path / name).items() if "distcp" in n} for name in "ab"]
    assert chunks[0] == chunks[1]
    # A reference decides the format; without one the checkpoint's own record does.
    export_checkpoint(tmp_path / "b", tmp_path / "again-fused")
    assert_same_weights(tmp_path / "fused", tmp_path / "again-fused")
    export_checkpoint(tmp_path / "b", tmp_path / "again-single", reference=single)
    assert_same_weights(single, tmp_path / "again-single")


def test_value_head_is_kept_or_reported_absent(tmp_path: Path) -> None:
    critic = write_random(tmp_path / "critic", "qwen3", head="value")
    policy = write_random(tmp_path / "policy", "qwen3")
    assert import_hf(critic, tmp_path / "a", head="value").absent == ()
    export_checkpoint(tmp_path / "a", tmp_path / "back")
    assert_same_weights(critic, tmp_path / "back")
    with CheckpointReader(critic) as reader:
        for layout in layouts_of("qwen3").values():
            assert round_trip(reader, Sharding(read_hf_config(critic), layout, head="value")) == (
                len(reader.tensors),
                (),
            )
    report = import_hf(policy, tmp_path / "b", head="value")
    assert (report.absent, report.ignored) == (("output_layer.weight",), ("lm_head.weight",))
    assert export_checkpoint(tmp_path / "b", tmp_path / "headless").absent == ("output_layer.weight",)
    with CheckpointReader(policy) as a, CheckpointReader(tmp_path / "headless") as b:
        assert compare(a, b).only_first == ("lm_head.weight",)


def test_prediction_layers_are_kept_from_reference_or_dropped(tmp_path: Path) -> None:
    source, dist = write_random(tmp_path / "hf", "deepseek_v3"), tmp_path / "dist"
    report = import_hf(source, dist)
    assert report.ignored
    assert all(name.startswith("model.layers.4.") for name in report.ignored)
    with pytest.raises(UserError, match="1 multi-token prediction layers"):
        export_checkpoint(dist, tmp_path / "nowhere")
    kept = export_checkpoint(dist, tmp_path / "kept", reference=source)
    assert kept.kept == report.ignored
    assert_same_weights(source, tmp_path / "kept")
    dropped = export_checkpoint(dist, tmp_path / "dropped", options=ExportOptions(mtp="drop"))
    assert dropped.config_changes == ("num_nextn_predict_layers",)
    with CheckpointReader(source) as a, CheckpointReader(tmp_path / "dropped") as b:
        comparison = compare(a, b)
    assert comparison.only_first == report.ignored
    assert not comparison.only_second + comparison.different
    config = json.loads((tmp_path / "dropped" / "config.json").read_text())
    assert config == json.loads((source / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    with open_checkpoint(dist) as checkpoint:
        assert checkpoint.hf.mtp == "drop"


def test_dtype_spares_parameters_that_are_always_float32(tmp_path: Path) -> None:
    source, dist = write_random(tmp_path / "hf", "deepseek_v3", dtype=torch.float32), tmp_path / "dist"
    import_hf(source, dist, dtype="bfloat16", mtp="load")
    for dtype, said in ((None, "bfloat16"), ("float16", "float16")):
        back = tmp_path / f"back-{said}"
        report = export_checkpoint(dist, back, options=ExportOptions(dtype=dtype))
        assert report.config_changes == ("torch_dtype",)
        assert json.loads((back / "config.json").read_text())["torch_dtype"] == said
        with CheckpointReader(source) as a, CheckpointReader(back) as b:
            for name in a.tensors:
                expected = a.read(name)
                if not name.endswith("e_score_correction_bias"):
                    expected = expected.bfloat16().to(getattr(torch, said))
                assert torch.equal(b.read(name), expected)
                assert b.tensors[name].dtype == expected.dtype


def test_8_bit_blocks_are_decoded_and_config_follows(tmp_path: Path) -> None:
    source = write_random(tmp_path / "hf", "deepseek_v3", num_nextn_predict_layers=0)
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": quantization}
    name = "model.layers.0.mlp.down_proj.weight"
    with CheckpointReader(source) as reader:
        blocks, scale = reader.read(name).to(torch.float8_e4m3fn), torch.tensor([[0.37]])
    eight = rewritten(source, tmp_path / "fp8", **{name: blocks, f"{name}_scale_inv": scale})
    (eight / "config.json").write_text(json.dumps(config))
    import_hf(eight, tmp_path / "dist")
    assert export_checkpoint(tmp_path / "dist", tmp_path / "back").config_changes == ("quantization_config",)
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    with CheckpointReader(tmp_path / "back") as reader:
        assert torch.equal(reader.read(name), (blocks.float() * scale).bfloat16())


def test_missing_tensors_need_permission_and_are_named(tmp_path: Path) -> None:
    lost = {"model.layers.1.mlp.down_proj.weight", "model.layers.2.input_layernorm.weight"}
    source, dist = write_random(tmp_path / "hf", "qwen2", left_out=lost), tmp_path / "dist"
    with pytest.raises(UserErrors, match=r"model\.layers\.1\.mlp\.down_proj\.weight is missing"):
        import_hf(source, dist, allow_missing=["*.2.*"])
    assert not dist.exists()
    names = ("decoder.layers.1.mlp.linear_fc2.weight", "decoder.layers.2.input_layernorm.weight")
    assert import_hf(source, dist, allow_missing=["*"]).absent == names
    assert export_checkpoint(dist, tmp_path / "back").absent == names
    assert_same_weights(source, tmp_path / "back")
    half = write_random(tmp_path / "half", "qwen2", left_out=["model.layers.0.self_attn.k_proj.weight"])
    with pytest.raises(UserError, match=r"k_proj.weight is missing but .*q_proj.weight is not"):
        import_hf(half, tmp_path / "never", allow_missing=["*"])


def test_interrupted_run_leaves_nothing_and_overwriting_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (write_random(tmp_path / name, "qwen3", seed=seed) for seed, name in enumerate(("old", "new")))
    target, overwrite = tmp_path / "stored", True
    import_hf(old, target)
    before = contents(target)
    with pytest.raises(UserError, match="exists and is not empty"):
        import_hf(new, target)

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    for where in ("write_metadata", "copy_files"):
        with monkeypatch.context() as patch:
            patch.setattr(offline, where, interrupted)
            with pytest.raises(KeyboardInterrupt):
                import_hf(new, target, overwrite=overwrite)
            with pytest.raises(KeyboardInterrupt):
                import_hf(new, tmp_path / "fresh")
        assert contents(target) == before
        assert not (tmp_path / "fresh").exists()
    import_hf(new, target, overwrite=overwrite)
    import_hf(new, tmp_path / "fresh")
    assert contents(target) == contents(tmp_path / "fresh") != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "new", "old", "stored"]


def test_impossible_sources_and_targets_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, dist = write_random(tmp_path / "hf", "qwen2"), tmp_path / "dist"
    import_hf(source, dist)
    overwrite = True
    cases = {
        "inside one another": lambda: import_hf(source, source / "x"),
        "choose another directory": lambda: import_hf(source, source, overwrite=overwrite),
        "not inside|inside one another": lambda: export_checkpoint(dist, tmp_path, overwrite=overwrite),
        "no such directory": lambda: export_checkpoint(tmp_path / "nothing", tmp_path / "y"),
        "Hugging Face checkpoint already": lambda: export_checkpoint(source, tmp_path / "y"),
        "dtype=int3": lambda: export_checkpoint(dist, tmp_path / "y", options=ExportOptions(dtype="int3")),
    }
    for message, run in cases.items():
        with pytest.raises(UserError, match=message):
            run()
    monkeypatch.setattr("mega_rl.converters.safetensors.output_folder.free_bytes", lambda folder: 1000)
    with pytest.raises(UserError, match=r"has 1\.00 KB free"):
        import_hf(source, tmp_path / "y")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dist", "hf"]


def test_mutants_of_the_manifest_are_user_errors(tmp_path: Path) -> None:
    """Every field missing, of wrong type, out of range, and random damage: more than 150 mutants, no traceback."""
    folder = tmp_path / "dist"
    import_hf(write_random(tmp_path / "hf", "qwen3_moe"), folder)
    path = folder / "mega_rl.json"
    text = path.read_text()
    raw = json.loads(text)
    wrong: list[object] = [None, True, -1, 0, 2.5, 10**30, "x", [], {}, [None], ["x"], [3, -1], 7]
    mutants = ["", "[]", "null", "{" * 5000, text[:-3], text.replace('"mtp"', '"head"'), json.dumps(raw | {"new": 1})]
    for key in raw:
        mutants.append(json.dumps({name: value for name, value in raw.items() if name != key}))
        mutants += [json.dumps(raw | {key: value}) for value in wrong if value != raw[key]]
    random = Random(0)
    for _ in range(80):
        at = random.randrange(len(text))
        mutants.append(text[:at] + chr(random.randrange(32, 127)) + text[at + 1 :])
    refused = 0
    for mutant in mutants:
        path.write_text(mutant)
        try:
            open_checkpoint(folder).files.close()
        except UserError as error:
            refused += str(folder) in str(error)
    assert len(mutants) > 150
    assert refused > len(mutants) - 20
    path.write_text(json.dumps(raw | {"version": True}))
    with pytest.raises(UserError, match="version=True"):
        read_manifest(folder)


@pytest.mark.parametrize("verb", ["import", "export"])
def test_memory_is_the_largest_tensor_and_a_buffer(verb: str, tmp_path: Path) -> None:
    """300 MB in a process of its own; the largest tensor of the source is 32 MB, the largest parameter 64 MB."""
    config = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 16384, "vocab_size": 8000}
    source = write_random(tmp_path / "hf", "qwen2", shard_bytes=100 << 20, num_hidden_layers=3, **config)
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    assert size > 300e6
    if verb == "export":
        import_hf(source, tmp_path / "dist")
        source = tmp_path / "dist"
    (growth,) = run_ranks(1, peak_growth, verb, str(source), str(tmp_path / "out"), timeout_s=90)
    threads = min(8, len(os.sched_getaffinity(0)))
    largest = 2 * 16384 * 1024 * 2
    # 32 MiB for modules imported on the way (half of it), plans and what the allocator keeps.
    limit = max(largest, writing.BUFFER_BYTES) + threads * copying.STAGING_BYTES + (32 << 20)
    assert growth < limit, f"{growth / 2**20:.0f} MiB of {size / 2**20:.0f}"
