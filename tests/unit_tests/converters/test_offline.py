"""Conversion without a model: round trips of every family and layout, resharding, interruptions, bad inputs."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import save_file

from mega_rl.converters.live import copying as fill
from mega_rl.converters.offline import convert as offline
from mega_rl.converters.offline import streaming
from mega_rl.converters.offline.compare import compare
from mega_rl.converters.offline.convert import (
    ExportOptions,
    Format,
    ImportOptions,
    WriteOptions,
    export_checkpoint,
    import_hf,
    open_checkpoint,
    reshard,
)
from mega_rl.converters.offline.manifest import parse_manifest
from mega_rl.errors import UserError, UserErrors
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.storage.safetensors_reader import CheckpointReader
from mega_rl.storage.safetensors_writer import write_checkpoint
from tests.helpers.distributed import run_ranks
from tests.helpers.selection import FULL, covering
from tests.unit_tests.converters import offline_cases
from tests.unit_tests.converters.random_checkpoints import contents, layouts_of, write_random
from tests.unit_tests.converters.tiny_configs import TINY


def assert_same_weights(first: Path, second: Path) -> None:
    """Names, dtypes, shapes and every bit agree, and config.json, tokenizer and templates byte for byte."""
    with CheckpointReader(first) as a, CheckpointReader(second) as b:
        comparison = compare(a, b)
    assert comparison.equal, comparison
    beside = [{n: c for n, c in contents(folder).items() if "safetensors" not in n} for folder in (first, second)]
    assert beside[0] == beside[1]
    assert "config.json" in beside[0]


ROUND_TRIPS = covering(((family, name) for family in TINY for name in layouts_of(family)), times=2)


@pytest.mark.parametrize("family", TINY)
def test_every_family_and_layout_comes_back_bit_for_bit(family: str, tmp_path: Path) -> None:
    source = write_random(tmp_path / "hf", family)
    for name, layout in layouts_of(family).items():
        if (family, name) not in ROUND_TRIPS:
            continue
        for spec in ("te", "local") if name == "tp2-pp2" else ("local",):
            stored = tmp_path / f"{name}-{spec}"
            report = import_hf(
                source, stored, layout=layout, format="ranks", options=ImportOptions(spec=spec, mtp="load")
            )
            assert not report.absent
            back = tmp_path / f"{name}-{spec}-hf"
            export_checkpoint(stored, back, options=ExportOptions(shard_bytes=60_000))
            assert_same_weights(source, back)


@pytest.mark.parametrize("family", TINY)
def test_distributed_checkpoints_come_back_bit_for_bit(family: str, tmp_path: Path) -> None:
    source = write_random(tmp_path / "hf", family)
    stored, back = tmp_path / "dist", tmp_path / "back"
    import_hf(source, stored, layout=layouts_of(family)["tp2"], format="torch_dist", options=ImportOptions(mtp="load"))
    export_checkpoint(stored, back, options=ExportOptions(shard_bytes=60_000))
    assert_same_weights(source, back)


@pytest.mark.parametrize("family", ["qwen2", "qwen2_moe", "deepseek_v3", "gpt_oss"] if FULL else ["qwen2_moe"])
def test_resharding_is_importing_with_the_other_layout(family: str, tmp_path: Path) -> None:
    """Bytes of every file, for every pair of neighbours in a ring of layouts, and both ways to the other format."""
    source = write_random(tmp_path / "hf", family)
    layouts = list(layouts_of(family).items())
    for i, (name, layout) in enumerate(layouts):
        import_hf(
            source,
            tmp_path / name,
            layout=layout,
            format="ranks",
            options=ImportOptions(spec=("te", "local")[i % 2], mtp="load"),
        )
    import_hf(
        source,
        tmp_path / "dist",
        layout=layouts[0][1],
        format="torch_dist",
        options=ImportOptions(spec="te", mtp="load"),
    )
    for i, (name, _) in enumerate(layouts):
        other, layout = layouts[(i + 1) % len(layouts)]
        spec = ("te", "local")[(i + 1) % len(layouts) % 2]
        reshard(tmp_path / name, tmp_path / f"{name}.to.{other}", layout=layout, spec=spec)
        assert contents(tmp_path / f"{name}.to.{other}") == contents(tmp_path / other), (name, other)
        reshard(tmp_path / "dist", tmp_path / f"dist.to.{other}", layout=layout, spec=spec, format="ranks")
        assert contents(tmp_path / f"dist.to.{other}") == contents(tmp_path / other), other
        padded = {"padded_vocab": 99}
        reshard(
            tmp_path / name,
            tmp_path / f"{name}.to.dist",
            layout=layouts[0][1],
            format="torch_dist",
            spec="te",
            **padded,
        )
        assert contents(tmp_path / f"{name}.to.dist") == contents(tmp_path / "dist"), name


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_tensors_larger_than_a_piece_are_written_in_pieces(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few rows at a time; a buffer of less than a tensor, shared by four threads."""
    source = write_random(tmp_path / "hf", family)
    layout = layouts_of(family)["ep2-tp2"]
    import_hf(source, tmp_path / "whole", layout=layout, format="ranks", options=ImportOptions(mtp="load"))
    monkeypatch.setattr(streaming, "PIECE_BYTES", 500)
    monkeypatch.setattr(streaming, "BUFFER_BYTES", 700)
    import_hf(
        source,
        tmp_path / "pieces",
        layout=layout,
        format="ranks",
        options=ImportOptions(mtp="load"),
        writing=WriteOptions(jobs=4),
    )
    assert contents(tmp_path / "pieces") == contents(tmp_path / "whole")
    export_checkpoint(
        tmp_path / "pieces", tmp_path / "back", options=ExportOptions(shard_bytes=60_000), writing=WriteOptions(jobs=4)
    )
    assert_same_weights(source, tmp_path / "back")


def test_padding_of_the_vocabulary_changes_with_the_layout(tmp_path: Path) -> None:
    """More padding than one rank's rows, so that a rank holds nothing else; then none."""
    source = write_random(tmp_path / "hf", "qwen2", tie_word_embeddings=False)
    layouts = layouts_of("qwen2")
    import_hf(source, tmp_path / "wide", layout=layouts["tp2"], format="ranks", options=ImportOptions(padded_vocab=256))
    import_hf(source, tmp_path / "narrow", layout=layouts["1"], format="ranks")
    reshard(tmp_path / "wide", tmp_path / "back", layout=layouts["1"])
    assert contents(tmp_path / "back") == contents(tmp_path / "narrow")
    with CheckpointReader(tmp_path / "wide" / "common-pp0-tp1.safetensors") as reader:
        assert reader.tensors["0.embedding.word_embeddings.weight"].shape == (128, 40)
        assert not reader.read("0.embedding.word_embeddings.weight").any()
    export_checkpoint(tmp_path / "wide", tmp_path / "exported")
    assert_same_weights(source, tmp_path / "exported")
    import_hf(
        source, tmp_path / "dist", layout=layouts["1"], format="torch_dist", options=ImportOptions(padded_vocab=256)
    )
    reshard(tmp_path / "dist", tmp_path / "from-dist", layout=layouts["1"], format="ranks")
    assert contents(tmp_path / "from-dist") == contents(tmp_path / "narrow")


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "mixtral"])
def test_fused_and_single_experts_are_the_same_parameters(family: str, tmp_path: Path) -> None:
    single = write_random(tmp_path / "single", family)
    layout = layouts_of(family)["ep2-etp2"]
    import_hf(single, tmp_path / "a", layout=layout, format="ranks", options=ImportOptions(mtp="load"))
    export_checkpoint(tmp_path / "a", tmp_path / "fused", options=ExportOptions(experts="fused"))
    with CheckpointReader(tmp_path / "fused") as reader:
        assert any(len(info.shape) == 3 for info in reader.tensors.values())
    import_hf(tmp_path / "fused", tmp_path / "b", layout=layout, format="ranks", options=ImportOptions(mtp="load"))
    ranks = [{n: c for n, c in contents(tmp_path / name).items() if "safetensors" in n} for name in "ab"]
    assert ranks[0] == ranks[1]
    # A reference decides the format, the checkpoint's own memory comes after it.
    export_checkpoint(tmp_path / "b", tmp_path / "again-fused")
    assert_same_weights(tmp_path / "fused", tmp_path / "again-fused")
    export_checkpoint(tmp_path / "b", tmp_path / "again-single", reference=single)
    assert_same_weights(single, tmp_path / "again-single")


def test_a_value_head_is_kept_or_reported_and_left_out(tmp_path: Path) -> None:
    layout = layouts_of("qwen3")["tp2-pp2"]
    critic = write_random(tmp_path / "critic", "qwen3", head="value")
    policy = write_random(tmp_path / "policy", "qwen3")
    for kind in ("ranks", "torch_dist"):
        assert (
            import_hf(
                critic, tmp_path / f"a-{kind}", layout=layout, format=kind, options=ImportOptions(head="value")
            ).absent
            == ()
        )
        export_checkpoint(tmp_path / f"a-{kind}", tmp_path / f"back-{kind}")
        assert_same_weights(critic, tmp_path / f"back-{kind}")
        report = import_hf(
            policy, tmp_path / f"b-{kind}", layout=layout, format=kind, options=ImportOptions(head="value")
        )
        assert report.absent == ("output_layer.weight",)
        assert report.ignored == ("lm_head.weight",)
        moved = tmp_path / f"c-{kind}"
        reshard(tmp_path / f"b-{kind}", moved, layout=layouts_of("qwen3")["tp2"], format="ranks")
        assert export_checkpoint(moved, tmp_path / f"headless-{kind}").absent == ("output_layer.weight",)
        with CheckpointReader(policy) as a, CheckpointReader(tmp_path / f"headless-{kind}") as b:
            assert compare(a, b).only_first == ("lm_head.weight",)


def test_tied_and_untied_models_in_one_process(tmp_path: Path) -> None:
    """A tied model has one copy of its table on disk, and a second home where the last stage has no embedding."""
    layout = layouts_of("qwen2")["tp2-pp2"]
    for tied in (True, False, True):
        folder = tmp_path / f"{tied}-{len(list(tmp_path.iterdir()))}"
        source = write_random(folder / "hf", "qwen2", tie_word_embeddings=tied)
        import_hf(source, folder / "ranks", layout=layout, format="ranks")
        with CheckpointReader(folder / "ranks" / "common-pp1-tp1.safetensors") as last:
            output = last.read("0.output_layer.weight")
        with CheckpointReader(folder / "ranks" / "common-pp0-tp1.safetensors") as first:
            embedding = first.read("0.embedding.word_embeddings.weight")
        assert torch.equal(output, embedding) is tied
        export_checkpoint(folder / "ranks", folder / "back")
        assert_same_weights(source, folder / "back")


def test_prediction_layers_are_kept_from_the_reference_or_dropped(tmp_path: Path) -> None:
    source = write_random(tmp_path / "hf", "deepseek_v3")
    layout = layouts_of("deepseek_v3")["ep2"]
    report = import_hf(source, tmp_path / "ranks", layout=layout, format="ranks")
    assert report.ignored
    assert all(name.startswith("model.layers.4.") for name in report.ignored)
    with pytest.raises(UserError, match="1 multi-token prediction layers"):
        export_checkpoint(tmp_path / "ranks", tmp_path / "nowhere")
    kept = export_checkpoint(tmp_path / "ranks", tmp_path / "kept", reference=source)
    assert kept.kept == report.ignored
    assert_same_weights(source, tmp_path / "kept")
    dropped = export_checkpoint(tmp_path / "ranks", tmp_path / "dropped", options=ExportOptions(mtp="drop"))
    assert dropped.config_changes == ("num_nextn_predict_layers",)
    with CheckpointReader(source) as a, CheckpointReader(tmp_path / "dropped") as b:
        comparison = compare(a, b)
    assert comparison.only_first == report.ignored
    assert not comparison.only_second
    assert not comparison.different
    config = json.loads((tmp_path / "dropped" / "config.json").read_text())
    assert config == json.loads((source / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    with open_checkpoint(tmp_path / "ranks") as checkpoint:
        assert checkpoint.hf.mtp == "drop"


def test_a_dtype_is_for_all_but_what_is_float32_in_every_model(tmp_path: Path) -> None:
    source = write_random(tmp_path / "hf", "deepseek_v3", dtype=torch.float32)
    layout = layouts_of("deepseek_v3")["tp2"]
    import_hf(
        source, tmp_path / "ranks", layout=layout, format="ranks", options=ImportOptions(dtype="bfloat16", mtp="load")
    )
    for dtype, said in ((None, "bfloat16"), ("float16", "float16")):
        back = tmp_path / f"back-{said}"
        report = export_checkpoint(tmp_path / "ranks", back, options=ExportOptions(dtype=dtype))
        assert report.config_changes == ("torch_dtype",)
        assert json.loads((back / "config.json").read_text())["torch_dtype"] == said
        with CheckpointReader(source) as a, CheckpointReader(back) as b:
            for name in a.tensors:
                expected = a.read(name)
                if not name.endswith("e_score_correction_bias"):
                    expected = expected.bfloat16().to(getattr(torch, said))
                assert torch.equal(b.read(name), expected)
                assert b.tensors[name].dtype == expected.dtype


def test_8_bit_blocks_are_decoded_and_no_longer_announced(tmp_path: Path) -> None:
    source = write_random(tmp_path / "hf", "deepseek_v3", num_nextn_predict_layers=0)
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": quantization}
    name = "model.layers.0.mlp.down_proj.weight"
    with CheckpointReader(source) as reader:
        state = {other: reader.read(other) for other in reader.tensors}
    blocks = state[name].to(torch.float8_e4m3fn)
    scale = torch.tensor([[0.37]])
    state |= {name: blocks, f"{name}_scale_inv": scale}
    write_checkpoint(tmp_path / "fp8", state.items())
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    import_hf(tmp_path / "fp8", tmp_path / "ranks", layout=layouts_of("deepseek_v3")["tp2"], format="ranks")
    report = export_checkpoint(tmp_path / "ranks", tmp_path / "back")
    assert report.config_changes == ("quantization_config",)
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    with CheckpointReader(tmp_path / "back") as reader:
        assert torch.equal(reader.read(name), (blocks.float() * scale).bfloat16())


def test_missing_tensors_need_leave_and_are_named(tmp_path: Path) -> None:
    lost = {"model.layers.1.mlp.down_proj.weight", "model.layers.2.input_layernorm.weight"}
    source = write_random(tmp_path / "hf", "qwen2", left_out=lost)
    layout = layouts_of("qwen2")["tp2"]
    with pytest.raises(UserErrors) as caught:
        import_hf(
            source, tmp_path / "ranks", layout=layout, format="ranks", options=ImportOptions(allow_missing=["*.2.*"])
        )
    assert "model.layers.1.mlp.down_proj.weight is missing" in str(caught.value)
    assert not (tmp_path / "ranks").exists()
    names = ("decoder.layers.1.mlp.linear_fc2.weight", "decoder.layers.2.input_layernorm.weight")
    for kind in ("ranks", "torch_dist"):
        stored = tmp_path / kind
        assert (
            import_hf(source, stored, layout=layout, format=kind, options=ImportOptions(allow_missing=["*"])).absent
            == names
        )
        assert export_checkpoint(stored, tmp_path / f"back-{kind}").absent == names
        assert_same_weights(source, tmp_path / f"back-{kind}")
    half = write_random(tmp_path / "half", "qwen2", left_out=["model.layers.0.self_attn.k_proj.weight"])
    with pytest.raises(UserError, match=r"k_proj.weight is missing but .*q_proj.weight is not"):
        import_hf(half, tmp_path / "never", layout=layout, format="ranks", options=ImportOptions(allow_missing=["*"]))


def test_parts_of_one_parameter_must_agree_in_dtype(tmp_path: Path) -> None:
    source = write_random(tmp_path / "hf", "qwen2")
    name = "model.layers.3.self_attn.v_proj.bias"
    with CheckpointReader(source) as reader:
        state = {other: reader.read(other) for other in reader.tensors}
    state[name] = state[name].float()
    write_checkpoint(tmp_path / "mixed", state.items(), files={"config.json": source / "config.json"})
    layout = layouts_of("qwen2")["tp2"]
    with pytest.raises(UserError, match=r"v_proj\.bias is float32; give the dtype"):
        import_hf(tmp_path / "mixed", tmp_path / "ranks", layout=layout, format="ranks")
    import_hf(
        tmp_path / "mixed", tmp_path / "ranks", layout=layout, format="ranks", options=ImportOptions(dtype="bfloat16")
    )


@pytest.mark.parametrize("kind", ["ranks", "torch_dist"])
def test_an_interrupted_run_leaves_nothing_and_overwriting_replaces_as_a_whole(
    kind: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = layouts_of("qwen3")["tp2"]
    old, new = (write_random(tmp_path / name, "qwen3", seed=seed) for seed, name in enumerate(("old", "new")))
    target = tmp_path / "stored"
    import_hf(old, target, layout=layout, format=kind)
    before = contents(target)
    with pytest.raises(UserError, match="exists and is not empty"):
        import_hf(new, target, layout=layout, format=kind)

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    for where in ("write_manifest", "copy_files"):
        with monkeypatch.context() as patch:
            patch.setattr(offline, where, interrupted)
            with pytest.raises(KeyboardInterrupt):
                import_hf(new, target, layout=layout, format=kind, writing=WriteOptions(overwrite=True))
            with pytest.raises(KeyboardInterrupt):
                import_hf(new, tmp_path / "fresh", layout=layout, format=kind)
        assert contents(target) == before
        assert not (tmp_path / "fresh").exists()
    import_hf(new, target, layout=layout, format=kind, writing=WriteOptions(overwrite=True))
    import_hf(new, tmp_path / "fresh", layout=layout, format=kind)
    assert contents(target) == contents(tmp_path / "fresh") != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "new", "old", "stored"]


def test_targets_and_sources_that_cannot_be(tmp_path: Path) -> None:
    source = write_random(tmp_path / "hf", "qwen2")
    layout = layouts_of("qwen2")["tp2"]
    ranks = tmp_path / "ranks"
    import_hf(source, ranks, layout=layout, format="ranks")
    cases = {
        "inside one another": lambda: import_hf(source, source / "x", layout=layout, format="ranks"),
        "choose another directory": lambda: reshard(ranks, ranks, layout=layout, writing=WriteOptions(overwrite=True)),
        "not inside|inside one another": lambda: export_checkpoint(
            ranks, tmp_path, writing=WriteOptions(overwrite=True)
        ),
        "no such directory": lambda: export_checkpoint(tmp_path / "nothing", tmp_path / "y"),
        "Hugging Face checkpoint already": lambda: export_checkpoint(source, tmp_path / "y"),
        "import it instead": lambda: reshard(source, tmp_path / "y", layout=layout),
        "dtype=int3": lambda: export_checkpoint(ranks, tmp_path / "y", options=ExportOptions(dtype="int3")),
        "tp=3 does not divide": lambda: reshard(ranks, tmp_path / "y", layout=ParallelLayout(world_size=3, tp=3)),
        "padded vocabulary 64 is smaller": lambda: reshard(ranks, tmp_path / "y", layout=layout, padded_vocab=64),
    }
    for message, run in cases.items():
        with pytest.raises(UserError, match=message):
            run()
        assert not (tmp_path / "y").exists()


def test_too_little_room_is_found_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_random(tmp_path / "hf", "qwen2")
    monkeypatch.setattr("mega_rl.storage.output_folder._free_bytes", lambda folder: 1000)
    with pytest.raises(UserError, match=r"has 1\.00 KB free"):
        import_hf(source, tmp_path / "ranks", layout=ParallelLayout(), format="ranks")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_damaged_rank_files_name_the_tensor_and_the_file(tmp_path: Path) -> None:
    source = write_random(tmp_path / "hf", "qwen2")
    folder = tmp_path / "ranks"
    import_hf(source, folder, layout=layouts_of("qwen2")["tp2"], format="ranks")
    path = folder / "common-pp0-tp1.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    with pytest.raises(UserError, match=r"common-pp0-tp1.safetensors: truncated"):
        open_checkpoint(folder)
    path.unlink()
    with pytest.raises(UserError, match=r"common-pp0-tp1.safetensors"):
        open_checkpoint(folder)
    path.write_bytes(whole)
    with CheckpointReader(path) as reader:
        state = {name: reader.read(name) for name in reader.tensors}
    path.unlink()
    name = "0.decoder.layers.1.mlp.linear_fc2.weight"
    state[name] = state[name][:, :-1]
    state["0.surplus.weight"] = state.pop("0.decoder.final_layernorm.weight")
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)
    with pytest.raises(UserErrors) as caught:
        open_checkpoint(folder)
    message = str(caught.value)
    assert f"{path}: {name} has shape [40, 27], its layout asks for [40, 28]" in message
    assert f"{path}: 0.decoder.final_layernorm.weight is missing" in message
    assert "0.surplus.weight is not part of the model" in message


def test_mutants_of_the_manifest_are_user_errors(tmp_path: Path) -> None:
    """Every field missing, of wrong type, out of range, and random damage: 300 mutants, no traceback."""
    source = write_random(tmp_path / "hf", "qwen3_moe")
    folder = tmp_path / "ranks"
    import_hf(source, folder, layout=layouts_of("qwen3_moe")["ep2-etp2"], format="ranks")
    path = folder / "mega_rl.json"
    text = path.read_text()
    raw = json.loads(text)
    wrong: list[object] = [None, True, -1, 0, 2.5, 10**30, "x", [], {}, [None], ["x"], [3, -1], 7]
    mutants = ["", "[]", "null", "{" * 5000, text[:-3], text.replace('"tp"', '"pp"'), json.dumps(raw | {"new": 1})]
    for key in raw:
        mutants.append(json.dumps({name: value for name, value in raw.items() if name != key}))
        mutants += [json.dumps(raw | {key: value}) for value in wrong if value != raw[key]]
    random = Random(0)
    for _ in range(100):
        at = random.randrange(len(text))
        mutants.append(text[:at] + chr(random.randrange(32, 127)) + text[at + 1 :])
    refused = 0
    for mutant in mutants:
        path.write_text(mutant)
        try:
            open_checkpoint(folder).files.close()
        except UserError as error:
            refused += str(folder) in str(error)
    assert len(mutants) > 250
    assert refused > len(mutants) - 20


def test_manifests_that_only_look_right_are_refused(tmp_path: Path) -> None:
    source = write_random(tmp_path / "hf", "qwen2")
    import_hf(source, tmp_path / "dist", layout=ParallelLayout(), format="torch_dist")
    raw = json.loads((tmp_path / "dist" / "mega_rl.json").read_text())
    assert parse_manifest(raw).kind == "torch_dist"
    with pytest.raises(UserError, match="kind=torch_dist must have tp=pp=vpp=ep=etp=1"):
        parse_manifest(raw | {"tp": 2})
    for name in ("tp", "padded_vocab", "version"):
        with pytest.raises(UserError, match=f"{name}=True"):
            parse_manifest(raw | {name: True})


def test_threads_wait_for_room_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never more than the buffer, or one tensor that is larger alone."""
    monkeypatch.setattr(streaming, "BUFFER_BYTES", 10)
    meter, inside, seen = streaming._Meter(None), [], []

    def work(num_bytes: int) -> None:
        with meter.room(num_bytes):
            inside.append(num_bytes)
            seen.append(tuple(inside))
            time.sleep(0.002)
            inside.remove(num_bytes)

    fill.in_threads([3, 4, 25, 9, 1, 2, 6, 12, 5, 5] * 3, work, threads=4)
    assert len(seen) == 30
    assert all(sum(sizes) <= 10 or len(sizes) == 1 for sizes in seen), seen


def test_tensors_that_fit_together_are_in_memory_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither thread leaves before both are inside: a room for one at a time would break the barrier."""
    monkeypatch.setattr(streaming, "BUFFER_BYTES", 10)
    meter, both_inside = streaming._Meter(None), threading.Barrier(2)

    def work(num_bytes: int) -> None:
        with meter.room(num_bytes):
            both_inside.wait(timeout=30)

    fill.in_threads([4, 6], work, threads=2)


def test_two_processes_write_what_one_writes(tmp_path: Path) -> None:
    source = write_random(tmp_path / "hf", "deepseek_v3")
    layout = layouts_of("deepseek_v3")["ep2-etp2"]
    import_hf(source, tmp_path / "one-ranks", layout=layout, format="ranks", options=ImportOptions(mtp="load"))
    import_hf(source, tmp_path / "one-dist", layout=layout, format="torch_dist", options=ImportOptions(mtp="load"))
    export_checkpoint(tmp_path / "one-ranks", tmp_path / "one-hf", options=ExportOptions(shard_bytes=60_000))
    counts = run_ranks(2, offline_cases.convert_all, str(tmp_path), timeout_s=90)
    for name in ("ranks", "dist", "hf"):
        assert contents(tmp_path / f"two-{name}") == contents(tmp_path / f"one-{name}"), name
    assert counts[0] == counts[1]


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    source = write_random(tmp_path / "hf", "qwen2")
    messages = run_ranks(2, offline_cases.fail_on_rank_1, str(source), str(tmp_path / "out"), timeout_s=60)
    assert messages[0] == "rank 1 failed: out of luck"
    assert messages[1] == "out of luck"
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("verb", ["ranks", "torch_dist", "export"] if FULL else ["export"])
def test_memory_is_the_largest_tensor_and_a_fixed_buffer(verb: str, tmp_path: Path) -> None:
    """Of 300 MB in a process of its own; the largest tensor of the source is 32 MB, the largest parameter 64 MB."""
    config = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 16384, "vocab_size": 8000}
    source = write_random(tmp_path / "hf", "qwen2", shard_bytes=100 << 20, num_hidden_layers=3, **config)
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    assert size > 300e6
    if verb == "export":
        layout = ParallelLayout(world_size=2, tp=2)
        import_hf(source, tmp_path / "ranks", layout=layout, format="ranks")
        source = tmp_path / "ranks"
    (growth,) = run_ranks(1, offline_cases.peak_growth, verb, str(source), str(tmp_path / "out"), timeout_s=90)
    threads = min(8, len(os.sched_getaffinity(0)))
    largest = 2 * 16384 * 1024 * 2
    # 32 MiB for modules imported on the way (half of it), plans and what the allocator keeps.
    limit = max(largest, streaming.BUFFER_BYTES) + threads * fill.STAGING_BYTES + (32 << 20)
    assert growth < limit, f"{growth / 2**20:.0f} MiB of {size / 2**20:.0f}"
