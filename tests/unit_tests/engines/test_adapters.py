"""Adapters compute what merged weights compute, and their gradients are those of the merged weights, projected."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad

from mega_rl.algorithms.statistics import Sequences
from mega_rl.checkpoint.weights import open_weights
from mega_rl.config.schema import MegatronOptimizerConfig
from mega_rl.config.schema.training import AdapterConfig
from mega_rl.converters.live.load import weights_on_disk
from mega_rl.converters.offline.convert import export_checkpoint, merge_adapter
from mega_rl.converters.plan.sharding import Head
from mega_rl.engines.fsdp_model import sharded_parameters
from mega_rl.engines.models.adapters import first_a, without_adapters
from mega_rl.rollout.embedded import EmbeddedWeightSync, HFRolloutEngine
from mega_rl.rollout.sampling import Sampler
from mega_rl.types import PER_TOKEN, TokenOutputs, row_numbers
from mega_rl.verify.twin import load_transformers
from tests.helpers.distributed import run_ranks
from tests.helpers.engines import (
    LAYOUTS,
    exported,
    exported_gradients,
    load_state,
    make_config,
    own_rows,
    parts,
    replaced,
    running_engine,
    save_state,
)
from tests.helpers.models import random_experience, write_tiny_checkpoint
from tests.helpers.selection import FULL, covering
from tests.peers.package import environment, missing
from tests.unit_tests.distributed.engine_cases import losses, whole

RANK, ALPHA = 4, 6.0
SCALE = ALPHA / RANK
OUTPUTS = {"lm": "logprobs", "value": "values"}
FIELDS = (*PER_TOKEN, "loss_weights", "token_weights")  # of the losses
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CASES: dict[str, tuple[str, tuple[str, ...]]] = {  # family, targets
    "dense": ("qwen3", ALL),
    "queries and values": ("qwen3", ("q_proj", "v_proj")),
    "joined": ("phi3", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    "mixture": ("qwen3_moe", ALL),
    "latent": ("deepseek_v3", ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "down_proj")),
}
# Relative distances of float32 from float64: at worst 8e-6, and 3e-5 in mixtures, where few tokens reach an expert and
# the float32 of transformers is off by 5e-5.
TOLERANCE, TOLERANCE_OF_MIXTURES = 1e-5, 5e-5


def write_pair(
    folder: Path, family: str, targets: tuple[str, ...], *, head: Head = "lm"
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Write a base, a checkpoint with adapters and one with merged weights; return each module's (A, B)."""
    write_tiny_checkpoint(folder / "merged", family=family)
    write_tiny_checkpoint(folder / "adapted", family=family)
    weights = load_file(folder / "merged" / "model.safetensors")
    adapters, generator = {}, torch.Generator().manual_seed(3)
    for name in [name for name in weights if re.search(rf"\.({'|'.join(targets)})\.weight$", name)]:
        rows, columns = weights[name].shape
        a, b = (0.3 * torch.randn(shape, generator=generator) for shape in ((RANK, columns), (rows, RANK)))
        adapters[name.removesuffix(".weight")] = a, b
        weights[name] = weights[name] + SCALE * b @ a
    write_tiny_checkpoint(folder / "base", family=family)
    base = load_file(folder / "base" / "model.safetensors")
    if head == "value":
        base["score.weight"] = weights["score.weight"] = 0.1 * torch.randn(1, 32, generator=generator)
    tensors = {f"{m}.lora_{end}.weight": part for m, (a, b) in adapters.items() for end, part in (("A", a), ("B", b))}
    for name, whole_model in (("merged", weights), ("base", base), ("adapted", base | tensors)):
        save_file(whole_model, folder / name / "model.safetensors", metadata={"format": "pt"})
    return adapters


def compute(
    rank: int, checkpoint: str, layout: str, targets: tuple[str, ...], low_rank: int = RANK, *, head: Head = "lm"
) -> dict[str, Any]:
    """Return outputs and gradients of one step of length zero; targets: none for a model without adapters."""
    engine_name = "fsdp" if layout.startswith("fsdp") else "megatron"
    config = make_config(
        Path(checkpoint),
        layout="1" if engine_name == "fsdp" else layout,
        engine=engine_name,
        optimizer=MegatronOptimizerConfig(distributed=False),
    )
    config = replaced(config, "optim", clip_grad=0.0)
    config = replaced(config, "engine.megatron", etp=1)
    if targets:
        config = replaced(config, "model", adapter=AdapterConfig(low_rank, ALPHA, list(targets)))
    with running_engine(config, head=head) as engine:
        rows = own_rows(random_experience(), engine)
        outputs, base = (
            whole(getattr(forward(rows), OUTPUTS[head]), engine)
            for forward in (engine.forward, without_adapters(engine.forward))
        )
        metrics = engine.train_minibatch(rows, losses(head), lr=0.0)
        read = fsdp_gradients if engine_name == "fsdp" else exported_gradients
        return {"outputs": outputs, "base": base, "norm": metrics["grad_norm"], "gradients": read(engine)}


def of_full_rank(rank: int, folder: str) -> list[dict[str, Any]]:
    """Return `compute` of the base, and with adapters of the rank of its queries' input."""
    return [compute(rank, f"{folder}/base", "1", ()), compute(rank, f"{folder}/full", "1", ("q_proj",), 32)]


def test_full_rank_follows_full_fine_tuning(tmp_path: Path) -> None:
    """With B = 0 and an orthogonal A that is fixed, dB = s dW A^T, so a step s dB A of W is s^2 dW."""
    for name in ("base", "full"):
        write_tiny_checkpoint(tmp_path / name, family="qwen3")
    weights = load_file(tmp_path / "full" / "model.safetensors")
    orthogonal = torch.linalg.qr(torch.randn(32, 32, generator=torch.Generator().manual_seed(1)))[0].contiguous()
    modules = [name.removesuffix(".weight") for name in weights if name.endswith("q_proj.weight")]
    tensors = {f"{module}.lora_A.weight": orthogonal.clone() for module in modules}
    tensors |= {f"{module}.lora_B.weight": torch.zeros(64, 32) for module in modules}
    save_file(weights | tensors, tmp_path / "full" / "model.safetensors", metadata={"format": "pt"})
    base, full = run_ranks(1, of_full_rank, str(tmp_path))[0]
    for module in modules:
        step = ALPHA / 32 * full["gradients"][f"{module}.lora_B.weight"] @ orthogonal
        wanted = (ALPHA / 32) ** 2 * base["gradients"][f"{module}.weight"]
        assert (step - wanted).norm() / wanted.norm() < TOLERANCE


def fsdp_gradients(engine: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of adapters by their names on disk."""
    return {
        name.replace(".adapter.a", ".lora_A.weight").replace(".adapter.b", ".lora_B.weight"): p.grad.full_tensor()
        for name, p in sharded_parameters(engine.model).items()
        if p.grad is not None
    }


def exact(checkpoint: Path, head: Head = "lm") -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return outputs and gradients of `compute`'s loss by transformers in float64, under the names on disk.

    Its norms compute in float32, which leaves 1e-7.
    """
    model, batch = load_transformers(checkpoint, torch.float64), random_experience()
    model.set_experts_implementation("eager")  # others have no float64
    mask, fields = batch.loss_mask, {name: getattr(batch, name).double() for name in FIELDS}
    if head == "lm":
        logprobs = model(batch.tokens, use_cache=False).logits[:, :-1].log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        logprobs = logprobs.gather(-1, batch.tokens[:, 1:, None])[..., 0]
        outputs = TokenOutputs(logprobs=pad(logprobs, (1, 0)) * mask, entropy=pad(entropy, (1, 0)) * mask)
    else:
        weight = load_file(checkpoint / "model.safetensors")["score.weight"].double().requires_grad_()
        values = model.model(batch.tokens, use_cache=False).last_hidden_state @ weight[0]
        outputs = TokenOutputs(values=pad(values[:, :-1], (1, 0)) * mask)
    losses(head)(outputs, fields, Sequences(row_numbers(mask), len(mask))).loss.backward()
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    gradients = weights_on_disk(model) | ({} if head == "lm" else {"score.weight": weight.grad})
    return getattr(outputs, OUTPUTS[head]).detach(), gradients


# Experts need sequence parallelism, and are no linear layers in transformers.
LAYOUTS_OF_ADAPTERS = ("1", "tp2-sp", "tp2", "pp2", "tp2-sp-pp2", "fsdp2")
WITH_HEAD = ("1", "tp2-sp", "pp2", "fsdp2") if FULL else ("tp2-sp", "fsdp2")
PAIRS = [
    (case, layout)
    for case in CASES
    for layout in LAYOUTS_OF_ADAPTERS
    if layout not in ("tp2", "fsdp2") or case not in ("mixture", "latent")
]


@pytest.mark.parametrize(("case", "layout"), covering(PAIRS))
def test_adapters_equal_merged_weights(case: str, layout: str, tmp_path: Path) -> None:
    """With W' = W + s B A: dA = s B^T dW' and dB = s dW' A^T."""
    family, targets = CASES[case]
    assert_exact(tmp_path, family, targets, layout)


@pytest.mark.parametrize("layout", WITH_HEAD)
def test_critic_trains_adapters_and_its_head(layout: str, tmp_path: Path) -> None:
    assert_exact(tmp_path, "qwen3", ALL, layout, head="value")


def assert_exact(folder: Path, family: str, targets: tuple[str, ...], layout: str, head: Head = "lm") -> None:
    """Compare `compute` on a layout with float64."""
    adapters = write_pair(folder, family, targets, head=head)
    outputs, of_merged = exact(folder / "merged", head)
    expected = {"score.weight": of_merged["score.weight"]} if head == "value" else {}
    for module, (a, b) in adapters.items():
        of_weight = of_merged[f"{module}.weight"]
        expected[f"{module}.lora_A.weight"] = SCALE * b.double().T @ of_weight
        expected[f"{module}.lora_B.weight"] = SCALE * of_weight @ a.double().T
    norm = torch.stack([one.square().sum() for one in expected.values()]).sum().sqrt()
    ranks = {"fsdp2": 2}.get(layout) or LAYOUTS[layout][0]
    got = run_ranks(ranks, partial(compute, head=head), str(folder / "adapted"), layout, targets)[0]
    for name, one in (("outputs", outputs), ("base", exact(folder / "base", head)[0])):
        torch.testing.assert_close(got[name].double(), one, atol=TOLERANCE, rtol=0, msg=f"{layout} {name}")
    assert {name for name in got["gradients"] if "bias" not in name} == expected.keys()
    limit = TOLERANCE_OF_MIXTURES if any("experts." in name for name in of_merged) else TOLERANCE
    for name, one in expected.items():
        far = (got["gradients"][name].double() - one).norm() / one.norm().clamp(min=1e-9)
        assert far < limit, f"{layout}: {name} is off by {far:.1e}"
    assert got["norm"] == pytest.approx(float(norm), rel=limit), layout


def steps(rank: int, checkpoint: str, layout: str, folder: str, start: str) -> dict[str, Any]:
    """Return weights, adapters and log-probs. start: "new": one step; "resumed": a second; or a PEFT folder: none."""
    name = "fsdp" if layout.startswith("fsdp") else "megatron"
    config = make_config(Path(checkpoint), layout="1" if name == "fsdp" else layout, engine=name)
    path = start if Path(start).is_dir() else ""
    config = replaced(config, "model", adapter=AdapterConfig(RANK, ALPHA, list(ALL), path=path))
    with running_engine(config) as engine:
        rows = own_rows(random_experience(), engine)
        if start == "resumed":
            load_state(engine, Path(folder))
        publish, sampler = embedded(engine, checkpoint)
        sizes = [publish()]
        if not path:
            engine.train_minibatch(rows, losses("lm"), lr=1e-2)
        if start == "new":
            save_state(engine, Path(folder), config=config)
            engine.save_hf(Path(folder) / "hf", source=Path(checkpoint))
        logprobs = whole(engine.forward(rows).logprobs, engine)
        sizes.append(publish())
        sampled = {"sizes": sizes, "logits": sampler.model(random_experience().tokens.to(engine.device)).logits.cpu()}
        return {"parts": parts(engine), "merged": exported(engine), "logprobs": logprobs, **sampled}


def embedded(engine: Any, checkpoint: str) -> tuple[Callable[[], float], HFRolloutEngine]:
    """Return (a function that publishes weights and returns their bytes, the embedded engine that gets them)."""
    sampler = HFRolloutEngine(
        checkpoint, dtype=torch.float32, device=engine.device, sampler=Sampler(1.0), max_new_tokens=1,
        stop_token_ids=[], batch_size=8,
    )  # fmt: skip
    assert sampler.adapt(engine.sharding.hf.adapter)
    export, alone = (partial(engine.export_weights, what) for what in ("apart", "adapters"))
    sync = EmbeddedWeightSync(export, sampler, verify_interval=1, export_adapters=alone)
    return lambda: sync.publish()["sync/bytes"], sampler


@pytest.fixture(scope="module", params=[("tp2-sp", "pp2"), ("fsdp2", "fsdp1")], ids=lambda pair: pair[0])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folder with base, run and its export; results of a step; a function that runs `steps` on the other layout."""
    (layout, other), folder = request.param, tmp_path_factory.mktemp("adapters")
    write_tiny_checkpoint(folder / "base")

    def run(layout: str, start: str) -> dict[str, Any]:
        ranks = 1 if layout == "fsdp1" else 2
        return run_ranks(ranks, steps, str(folder / "base"), layout, str(folder / "run"), start)[0]

    return folder, run(layout, "new"), lambda start, same=False: run(layout if same else other, start)


def test_base_stays_and_export_is_merged(trained: Any) -> None:
    """The base stays as it is, byte for byte; merged weights are W + s B A, live, offline and by the command."""
    folder, first, _ = trained
    base = load_file(folder / "base" / "model.safetensors")
    for name, tensor in first["parts"].items():
        assert "lora" in name or torch.equal(tensor, base[name]), name
    module = "model.layers.1.self_attn.k_proj"
    a, b = (first["parts"][f"{module}.lora_{end}.weight"] for end in "AB")
    assert b.any()
    for name, tensor in first["parts"].items():
        # B is zero in the first step, so A has no gradient yet: on every layout it is what its name gives.
        if name.endswith("lora_A.weight"):
            assert torch.equal(tensor, first_a(name.removesuffix(".lora_A.weight"), tuple(tensor.shape))), name
    assert torch.equal(first["merged"][f"{module}.weight"], base[f"{module}.weight"] + SCALE * (b @ a))
    (source,) = (folder / "run").glob("step*")
    opened = partial(open_weights, source, role="actor", reference=folder / "base")
    export_checkpoint(source, folder / "offline", reference=folder / "base", opened=opened)
    merge_adapter(folder / "base", folder / "run" / "hf" / "adapter", folder / "command")
    for where in (folder / "run" / "hf", folder / "offline", folder / "command"):
        weights = load_file(where / "model.safetensors")
        assert weights.keys() == base.keys()
        assert all(torch.equal(tensor, first["merged"][name]) for name, tensor in weights.items()), where
    live, offline = (folder / "run" / "hf" / "adapter", folder / "offline" / "adapter")
    assert (live / "adapter_config.json").read_bytes() == (offline / "adapter_config.json").read_bytes()
    apart, others = (load_file(path / "adapter_model.safetensors") for path in (live, offline))
    assert len(apart) == 2 * 7 * 4  # A and B, modules, layers
    assert apart.keys() == others.keys()
    assert all(torch.equal(tensor, others[name]) for name, tensor in apart.items())


def test_embedded_engine_gets_the_base_once(trained: Any) -> None:
    """Later updates are of the adapters' bytes, and the engine then computes what the trainer does."""
    _, first, _ = trained
    sizes = {"lora" in name: 0 for name in first["parts"]}
    for name, tensor in first["parts"].items():
        sizes["lora" in name] += tensor.nbytes
    assert first["sizes"] == [sizes[True] + sizes[False], sizes[True]]
    batch = random_experience()
    logprobs = first["logits"].log_softmax(-1)[:, :-1].gather(-1, batch.tokens[:, 1:, None])[..., 0]
    where = batch.loss_mask[:, 1:]
    torch.testing.assert_close(logprobs[where], first["logprobs"][:, 1:][where], atol=2e-6, rtol=0)


def test_resume_is_equal_on_its_layout_and_close_on_another(trained: Any) -> None:
    """A second step after a resume."""
    _, _, run = trained
    same, again, moved = run("resumed", True), run("resumed", True), run("resumed")
    for name, tensor in same["parts"].items():
        assert torch.equal(tensor, again["parts"][name]), name
        torch.testing.assert_close(tensor, moved["parts"][name], rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(missing("peft") is not None, reason=str(missing("peft")))
def test_peft_reads_and_writes_adapters(trained: Any) -> None:
    """Its logits and merged weights are ours; a run that begins from its folder has the same adapters."""
    folder, first, run = trained
    batch, out = random_experience(), folder / "peft"
    torch.save(batch.tokens, folder / "tokens.pt")
    arguments = [folder / "base", folder / "run" / "hf" / "adapter", folder / "tokens.pt", out]
    command = [sys.executable, "-W", "ignore", "-m", "tests.peers.peft_model", *map(str, arguments)]
    subprocess.run(command, env=environment(), check=True, timeout=120)
    answers = torch.load(out / "answers.pt")
    logprobs = answers["logits"].log_softmax(-1)[:, :-1].gather(-1, batch.tokens[:, 1:, None])[..., 0]
    where = batch.loss_mask[:, 1:]
    torch.testing.assert_close(logprobs[where], first["logprobs"][:, 1:][where], atol=2e-6, rtol=0)
    for name, tensor in first["merged"].items():
        torch.testing.assert_close(answers["merged"][name], tensor, atol=1e-7, rtol=0)
    again = run(str(out))
    assert all(torch.equal(tensor, first["parts"][name]) for name, tensor in again["parts"].items())
    torch.testing.assert_close(again["logprobs"], first["logprobs"], atol=2e-6, rtol=0)
