"""The language model of a checkpoint of images and text: read, trained and written back; the rest as it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from mega_rl.checkpoint.weights import open_weights
from mega_rl.converters.hf.config import parse_hf_config, read_hf_config
from mega_rl.converters.live.load import check_tensors, model_config, weights_on_disk
from mega_rl.converters.offline.compare import compare_checkpoints
from mega_rl.converters.offline.convert import ExportOptions, export_checkpoint, import_hf
from mega_rl.converters.plan.parameters import as_on_disk
from mega_rl.converters.safetensors.reader import CheckpointReader
from mega_rl.errors import UserError, UserErrors
from mega_rl.rollout.sglang.server.installation import SGLANG_VERSION, find_sglang
from mega_rl.rollout.sglang.weights.checks import ExpectedServer, mismatches, sent_shapes
from mega_rl.rollout.sglang.weights.transport import TrainerWeights
from mega_rl.tracking.metrics.records import read_metrics
from tests.helpers.distributed import run_ranks
from tests.helpers.engines import make_config, running_engine
from tests.helpers.models import write_digit_tokenizer, write_tiny_checkpoint
from tests.helpers.selection import FULL, on_megatron
from tests.helpers.sglang import needs_sglang
from tests.unit_tests.converters.tiny_configs import BASE
from tests.unit_tests.converters.wrapped import AHEAD, WRAPPED, quantise, rewrite, tensors_of, train_all, write_wrapped
from tests.unit_tests.trainer.assemble.run_cases import run_all

OLD, NEW = "language_model.model.", "model.language_model."


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wrapped(tmp_path_factory.mktemp("gemma3") / "hf")


def assert_bytes_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert [name for name in first if first[name].dtype != second[name].dtype] == []
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def test_sharded_checkpoint_comes_back_whole(gemma: Path, tmp_path: Path) -> None:
    assert len(list(gemma.glob("*.safetensors"))) > 3
    import_hf(gemma, tmp_path / "dist")
    assert compare_checkpoints(gemma, tmp_path / "dist").equal
    options = ExportOptions(shard_bytes=60_000)
    report = export_checkpoint(tmp_path / "dist", tmp_path / "back", reference=gemma, options=options)
    before, after = tensors_of(gemma), tensors_of(tmp_path / "back")
    assert_bytes_equal(before, after)
    assert set(report.kept) == {name for name in before if not name.startswith(OLD)}
    assert (tmp_path / "back/config.json").read_bytes() == (gemma / "config.json").read_bytes()
    index = json.loads((tmp_path / "back/model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == before.keys()
    with pytest.raises(UserError, match="language model only; name the reference"):
        export_checkpoint(tmp_path / "dist", tmp_path / "half")


def test_cast_of_the_text_spares_the_tower(gemma: Path, tmp_path: Path) -> None:
    import_hf(gemma, tmp_path / "dist")
    options = ExportOptions(dtype="bfloat16")
    export_checkpoint(tmp_path / "dist", tmp_path / "back", reference=gemma, options=options)
    before, after = tensors_of(gemma), tensors_of(tmp_path / "back")
    assert_bytes_equal({name: t.bfloat16() if name.startswith(OLD) else t for name, t in before.items()}, after)
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["vision_config"] == json.loads((gemma / "config.json").read_text())["vision_config"]


def test_names_outside_pass_and_names_inside_are_checked(tmp_path: Path) -> None:
    """The rule: what begins as the language model's names do is its own; anything else is not judged."""
    source = write_wrapped(tmp_path / "hf")
    tensors = {name.replace(OLD, NEW): tensor for name, tensor in tensors_of(source).items()}
    rewrite(source, tensors | {"model.audio_tower.gain": torch.arange(5)})
    hf = read_hf_config(source)
    assert hf.prefixes == (NEW, "lm_head.")
    with CheckpointReader(source) as reader:
        check_tensors(reader, as_on_disk(hf, {}), "lm")
        assert "model.audio_tower.gain" in reader.others
        assert "model.layers.0.mlp.up_proj.weight" in reader.tensors
    rewrite(source, tensors | {f"{NEW}layers.0.mlp.more.weight": torch.ones(2)})
    with CheckpointReader(source) as reader, pytest.raises(UserErrors, match=r"more\.weight \[2\] is not part of"):
        check_tensors(reader, hf, "lm")
    rewrite(source, tensors | {"model.layers.0.mlp.up_proj.weight": torch.ones(2)})
    with pytest.raises(UserError, match="holds two language models"):
        CheckpointReader(source)


@pytest.mark.parametrize("model_type", WRAPPED)
def test_text_class_computes_what_the_whole_model_does(model_type: str, tmp_path: Path) -> None:
    """The class that both engines build of the text's config, against the whole model of transformers on text."""
    source = write_wrapped(tmp_path / "hf", model_type, tied=model_type != "mistral3")
    whole = AutoModelForImageTextToText.from_pretrained(source, attn_implementation="eager").eval()
    model = AutoModelForCausalLM.from_config(model_config(source), attn_implementation="eager").eval()
    assert model.config.model_type == WRAPPED[model_type][0]
    with CheckpointReader(source) as reader:
        hf = as_on_disk(
            read_hf_config(source, any_model=True), {name: info.shape for name, info in reader.tensors.items()}
        )
        check_tensors(reader, hf, "lm")
        for name, weight in weights_on_disk(model).items():
            if name in reader.tensors:
                weight.copy_(reader.read(name))
    tokens = torch.randint(2, 47, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        # One formula in another module: only the order of float32 sums may differ.
        torch.testing.assert_close(model(tokens).logits, whole(tokens).logits, rtol=1e-5, atol=1e-5)


def test_gradients_are_those_of_the_whole_model(tmp_path: Path) -> None:
    """Every tensor of the text in each of three policy steps on two ranks; fp32, sums in another order.

    Parts of a decay's gradient (`A_log`) cancel each other: 1e-4 of its norm, where other tensors differ by 1e-5.
    """
    folders = {name: str(write_wrapped(tmp_path / name, name, tied=name != "mistral3")) for name in WRAPPED}
    ranks = run_ranks(2, train_all, folders, timeout_s=300)
    assert ranks[0].keys() == WRAPPED.keys()
    for model_type, steps in ranks[0].items():
        assert len(steps) == 3
        assert max(steps)[0] <= 3e-4, (model_type, max(steps))


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_published_prediction_layers_keep_their_bytes(family: str, tmp_path: Path) -> None:
    """Beside a text-only model too, where any other name is refused; the rest comes back from its stored parts."""
    source = write_tiny_checkpoint(tmp_path / "hf", family=family, tied=False)
    before = tensors_of(source) | AHEAD
    rewrite(source, before)
    import_hf(source, tmp_path / "dist")
    assert compare_checkpoints(source, tmp_path / "dist").equal
    report = export_checkpoint(tmp_path / "dist", tmp_path / "back", reference=source)
    assert set(report.kept) == AHEAD.keys()
    assert_bytes_equal(before, tensors_of(tmp_path / "back"))
    rewrite(source, before | {"mtpx.weight": torch.ones(2)})
    with pytest.raises(UserErrors, match=r"mtpx\.weight \[2\] is not part of the"):
        import_hf(source, tmp_path / "more")


def test_servers_are_sent_the_names_of_their_checkpoint(gemma: Path) -> None:
    """The server serves the whole model from its folder; only names of the text travel."""
    raw = json.loads((gemma / "config.json").read_text())
    with running_engine(make_config(gemma)) as engine:
        weights = TrainerWeights(engine, torch.float32)
        buckets, sent = weights.buckets(1 << 20), dict(weights.export(bucket_bytes=1 << 20))
        expected = ExpectedServer(engine.sharding.hf, sent_shapes(engine.sharding), "float32")
    on_disk = {name: tensor for name, tensor in tensors_of(gemma).items() if name.startswith(OLD)}
    assert_bytes_equal(on_disk, sent)
    assert {slot.name for bucket in buckets for slot in bucket.slots} == on_disk.keys()
    model = {"model_type": "gemma3", "architectures": raw["architectures"], "is_generation": True}
    server = {"version": SGLANG_VERSION, "dtype": "float32"}
    assert mismatches({**model, "model_path": str(gemma)}, server, expected) == []


@needs_sglang
@pytest.mark.skipif(not FULL, reason="a minute of a core: make test-full")
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"])
def test_sglang_loads_delta_nets_from_names_that_are_sent(family: str, tmp_path: Path) -> None:
    """Its own class, which cannot compute here: its kernels for CPUs need AMX, and their package is not on PyPI."""
    source, kinds = tmp_path / "hf", ["linear_attention", "full_attention"] * 2
    if family in WRAPPED:
        write_wrapped(source, family, tied=False)
    else:
        write_tiny_checkpoint(source, family=family, tied=False, layer_types=kinds, full_attention_interval=2)
    with running_engine(make_config(source, engine="fsdp")) as engine:
        sent = dict(TrainerWeights(engine, torch.float32).export(bucket_bytes=1 << 20))
    save_file(sent, tmp_path / "sent.safetensors")
    installation = find_sglang()
    assert installation is not None
    path = {"PYTHONPATH": os.pathsep.join(str(folder) for folder in (installation.folder, Path.cwd()) if folder)}
    command = [sys.executable, "-m", "tests.helpers.sglang_model", str(source), str(tmp_path / "sent.safetensors")]
    answer = subprocess.run(command, env=os.environ | path, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stderr[-2000:]
    assert json.loads(answer.stdout.splitlines()[-1]) == []


def test_older_files_of_qwen_have_no_text_config() -> None:
    ids = {"vision_start_token_id": 90, "image_token_id": 91, "vision_config": {"depth": 2}}
    mrope = {"type": "mrope", "mrope_section": [2, 1, 1]}
    hf = parse_hf_config({**BASE, "model_type": "qwen2_5_vl", "rope_scaling": mrope, **ids})
    assert hf == parse_hf_config({**BASE, "model_type": "qwen2"})
    assert hf.wrapper is not None


@pytest.mark.parametrize(
    ("engine", "model_type", "prefix", "quantised"),
    [
        ("megatron", "gemma3", OLD, False),
        ("fsdp", "gemma3", OLD, True),
        ("fsdp", "gemma4", NEW, False),
        pytest.param("megatron", "qwen3_5", NEW, False, marks=on_megatron("qwen3_5_text")),
    ],
)
def test_training_changes_the_text_and_nothing_else(
    engine: str, model_type: str, prefix: str, quantised: bool, tmp_path: Path
) -> None:
    """GRPO on two ranks with embedded rollouts; resumed bit for bit; exports of the run and of its checkpoint."""
    source = write_wrapped(tmp_path / "m", model_type)
    if model_type == "qwen3_5":
        rewrite(source, tensors_of(source) | AHEAD)
    before = quantise(source, prefix) if quantised else tensors_of(source)
    write_digit_tokenizer(source, vocab_size=50)
    reward = tmp_path / "reward.py"
    reward.write_text("def score(prompt, response, answer):\n    return float(len(set(response)))\n")
    rows = [{"prompt": f"{i}+2=", "answer": str(i + 2)} for i in range(4)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [
        *("model.dtype=fp32", "data.max_prompt_tokens=8", "rollout.max_new_tokens=4", "rollout.n=2"),
        *("trainer.prompts_per_step=4", "trainer.minibatch_size=4", "optim.lr=1e-2"),
        *("trainer.steps=3", "checkpoint.hf_final=true", "checkpoint.save_interval=2", "checkpoint.save_final=true"),
        *("trainer.timeout_s=90", "trainer.device=cpu", "metrics.tensorboard=false", "metrics.progress_bar=false"),
        *(f"model.path={source}", f"data.train_files=[{tmp_path / 'd.jsonl'}]", f"trainer.run_dir={tmp_path / 'run'}"),
        *(f"engine.backend={engine}", "algorithm.advantage=grpo", f"reward.functions={{score: {reward}:score}}"),
    ]
    if model_type == "qwen3_5":
        settings += ["engine.megatron.tp=2", "engine.megatron.sequence_parallel=true"]
    later = [f"trainer.run_dir={tmp_path / 'resumed'}", f"checkpoint.resume={tmp_path}/run/checkpoints/step_000002"]
    run_ranks(2, run_all, {"run": settings, "resumed": [*settings, *later]}, device="cpu", timeout_s=300)
    after, saved = tensors_of(tmp_path / "run/hf/step_000003"), tmp_path / "run/checkpoints/step_000003"
    assert_bytes_equal(after, tensors_of(tmp_path / "resumed/hf/step_000003"))
    if model_type != "gemma4":  # its text has no table
        opened = partial(open_weights, saved, role="actor", reference=source)
        export_checkpoint(saved, tmp_path / "later", reference=source, opened=opened)
        assert_bytes_equal(after, tensors_of(tmp_path / "later"))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name for name in changed if not name.startswith(prefix)} == set()
    assert f"{prefix}layers.0.mlp.up_proj.weight" in changed
    *_, record = read_metrics(tmp_path / "run/metrics.jsonl")
    # Of weights that a step moved; the rest of a tensor is as it was decoded.
    assert quantised == (0.001 < record.metrics.get("checkpoint/quantisation_loss_max", 0.0) < 0.05)
    assert "quantization_config" not in json.loads((tmp_path / "run/hf/step_000003/config.json").read_text())
