"""What each of two ranks does for test_fsdp.py: one launch for all."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file

from mega_rl.config.schema import Config, EngineConfig, MicrobatchConfig, ModelConfig, OptimConfig, TrainerConfig
from tests.helpers.engines import exported, own_rows, replaced, running_engine
from tests.helpers.models import random_experience, write_tiny_checkpoint
from tests.unit_tests.distributed.engine_cases import losses, whole
from tests.unit_tests.engines.engine_cases import inspect_update, same, skip_updates

STEPS = 2
# Ways to run that must not change a number, by name: fields of a config's areas.
WAYS: dict[str, dict[str, Any]] = {
    "padded": {"trainer.microbatch": {"packing": False, "size": 2}},
    "recomputed": {"model": {"recompute": "full"}},
    "reduced once for a step": {"engine.fsdp": {"reduce_every_microbatch": False}},
    "kept gathered": {"engine.fsdp": {"reshard_after_forward": False}},
    "two copies": {"engine.fsdp": {"shard_ranks": 1}},
    "on the host": {"engine.fsdp": {"cpu_offload": True}},
    "eager": {"model": {"attn_implementation": "eager"}},
    "frozen": {"model": {"frozen": ["model.layers.0.*", "model.embed_tokens.*"]}},
    "half frozen for Megatron-Core": {"model": {"frozen": ["decoder.layers.0.*", "embedding.*"]}},
}


def config_of(checkpoint: Path, *, engine: str = "fsdp", dtype: str = "fp32", **areas: dict[str, Any]) -> Config:
    """Small numbers, with fields of areas replaced."""
    config = Config(
        engine=EngineConfig(backend=engine),
        model=ModelConfig(path=str(checkpoint), dtype=dtype),
        # With a usual eps Adam's first step is the gradient's sign, which rounding decides where that is nearly zero.
        optim=OptimConfig(lr=1e-3, weight_decay=0.1, eps=1e-3),
        trainer=TrainerConfig(timeout_s=60.0, microbatch=MicrobatchConfig(max_tokens=64)),
    )
    for area, fields in areas.items():
        config = replaced(config, area, **fields)
    return config


@contextmanager
def engine_of(checkpoint: Path, *, trainable: bool = True, head: str = "lm", **more: Any) -> Iterator[Any]:
    """An engine that has done one optimizer step, if it does any."""
    with running_engine(config_of(checkpoint, **more), head=head, trainable=trainable) as engine:
        if trainable:
            train(engine)
        yield engine


def train(engine: Any, *, seed: int = 0) -> dict[str, float]:
    """One optimizer step."""
    rows = own_rows(random_experience(seed=seed), engine)
    return dict(engine.train_minibatch(rows, losses(engine.sharding.head), lr=1e-2))


def state(engine: Any) -> dict[str, torch.Tensor]:
    """Weights and optimizer state of this rank, as copies."""
    actual = engine.state()
    return {piece.name: piece.data.clone() for piece in actual.pieces} | {
        name: torch.tensor(number) for name, number in actual.numbers.items()
    }


def computed(checkpoint: Path, *, head: str = "lm", rows: int | None = None, **more: Any) -> dict[str, Any]:
    """Outputs, metrics of two steps, the weights before and after, and the FSDP engine's buffers, of one engine."""
    batch = random_experience()[:rows]
    with running_engine(config_of(checkpoint, **more), head=head) as engine:
        mine, on_fsdp = own_rows(batch, engine), hasattr(engine, "model")
        buffers = {name: buffer.clone() for name, buffer in engine.model.named_buffers()} if on_fsdp else {}
        outputs = engine.forward(mine)
        actual = {name: whole(value, engine) for name, value in vars(outputs).items() if value is not None}
        start = exported(engine)
        steps = [engine.train_minibatch(mine, losses(head), lr=1e-3) for _ in range(STEPS)]
        return {"outputs": actual, "start": start, "steps": steps, "weights": exported(engine), "buffers": buffers}


FROZEN = {"indexer", "beta", "eps"}  # parts of names


def distances(left: dict[str, Any], right: dict[str, Any]) -> dict[str, float]:
    """How far two of `computed` are from each other, `right` being the reference."""
    assert left["weights"].keys() == right["weights"].keys()
    pairs = [(a, b) for one, other in zip(left["steps"], right["steps"], strict=True) for a, b in _numbers(one, other)]
    moved = {
        name: right["weights"][name] - start
        for name, start in right["start"].items()
        if not name.endswith(("e_score_correction_bias", ".expert_bias"))  # are set and not learnt
    }
    return {
        "outputs": max(float((left["outputs"][n] - right["outputs"][n]).abs().max()) for n in right["outputs"]),
        "start": max(float((left["start"][n] - right["start"][n]).abs().max()) for n in right["start"]),
        "metrics": max(abs(a - b) / max(abs(b), 1e-2) for a, b in pairs),
        "grad_norm": max(
            abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in zip(left["steps"], right["steps"], strict=True)
        ),
        "moved": min(float(way.norm()) for name, way in moved.items() if not FROZEN & {*name.split(".")}),
        "weights": max(
            float((left["weights"][name] - right["weights"][name]).norm() / way.norm().clamp(min=1e-6))
            for name, way in moved.items()
        ),
    }


def _numbers(left: dict[str, float], right: dict[str, float]) -> list[tuple[float, float]]:
    names = right.keys() & left.keys() - {"num_microbatches"}
    assert {"grad_norm", "lr"} < names
    assert len(names) > 3
    return [(left[name], right[name]) for name in names]


def run_all(rank: int, folder: str, families: list[str]) -> dict[str, Any]:
    """Every case, on both ranks."""
    paths = {family: Path(folder) / family for family in families}
    tiny, critic = paths["qwen3"], Path(folder) / "critic"
    reference = computed(tiny, engine="megatron")
    frozen = computed(tiny, engine="megatron", **WAYS["half frozen for Megatron-Core"])
    undisturbed = two_steps(tiny)
    actual: dict[str, Any] = {
        "families": {
            family: family_case(path, reference if path == tiny else computed(path, engine="megatron"))
            for family, path in paths.items()
        },
        "ways": {
            name: distances(computed(tiny, **way), frozen if name == "frozen" else reference)
            for name, way in WAYS.items()
            if "Megatron" not in name
        },
        "value": distances(computed(critic, head="value"), computed(critic, head="value", engine="megatron")),
        "one row": distances(computed(tiny, rows=1), computed(tiny, rows=1, engine="megatron")),
        "bf16": bf16_case(tiny, undisturbed),
        "fresh value head": fresh_head_case(tiny),
        "spoiled": spoiled_case(tiny, undisturbed),
        "inspected": inspected_case(tiny),
        "offload": {"trains": offload_case(tiny, undisturbed), "frozen": offload_case(tiny, None)},
        "shares": shares_case(tiny),
        "waits": waits_case(tiny),
    }
    return actual


def write_checkpoints(folder: Path, families: list[str]) -> None:
    """A tiny checkpoint of each family, and `critic`, a llama with a value head."""
    for family in families:
        write_tiny_checkpoint(folder / family, family=family, tied=family in ("qwen3", "gemma3_text"))
    path = write_tiny_checkpoint(folder / "critic", family="llama") / "model.safetensors"
    head = torch.randn(1, 32, generator=torch.Generator().manual_seed(7))
    save_file({**load_file(path), "score.weight": head}, path, metadata={"format": "pt"})


def two_steps(checkpoint: Path) -> dict[str, Any]:
    """State and log-probs of an engine that nothing disturbs, which other ones are held against."""
    with engine_of(checkpoint) as engine:
        rows = own_rows(random_experience(), engine)
        first = engine.forward(rows).logprobs
        train(engine, seed=1)
        return {"first logprobs": first, "state": state(engine), "logprobs": engine.forward(rows).logprobs}


def bf16_case(checkpoint: Path, undisturbed: dict[str, Any]) -> dict[str, Any]:
    """Weights leave in bf16, shards and moments are float32, and gradients are added in float32."""
    with engine_of(checkpoint, dtype="bf16") as engine:
        pieces = {piece.name: str(piece.data.dtype) for piece in engine.state().pieces}
        out = exported(engine)
        logprobs = engine.forward(own_rows(random_experience(), engine)).logprobs
    return {
        "pieces": sorted(set(pieces.values())),
        "exported": sorted({str(tensor.dtype) for tensor in out.values()}),
        "outputs": float((logprobs - undisturbed["first logprobs"]).abs().max()),
    }


def fresh_head_case(checkpoint: Path) -> float:
    """The largest value that a critic without a trained head predicts."""
    with running_engine(config_of(checkpoint), head="value") as engine:
        return float(engine.forward(own_rows(random_experience(), engine)).values.abs().max())


def family_case(path: Path, megatron: dict[str, Any]) -> dict[str, float]:
    """How far a family is from the Megatron engine, and whether its buffers are those of a model built in memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    actual = computed(path)
    expected = dict(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).named_buffers())
    expected = {name: buffer for name, buffer in expected.items() if not name.endswith("_bias")}  # from the file
    buffers = {name: buffer for name, buffer in actual["buffers"].items() if name in expected}
    return distances(actual, megatron) | {"same buffers": same(buffers, expected)}


def spoiled_case(checkpoint: Path, undisturbed: dict[str, Any]) -> dict[str, Any]:
    """See `skip_updates`; beside an engine that only saw the good mini-batch."""
    with engine_of(checkpoint) as engine:
        return skip_updates(engine, state, math.nan, expected=undisturbed["state"])


def inspected_case(checkpoint: Path) -> dict[str, Any]:
    """See `inspect_update`."""
    with engine_of(checkpoint) as engine:
        return inspect_update(engine, state)


def offload_case(checkpoint: Path, undisturbed: dict[str, Any] | None) -> dict[str, Any]:
    """An engine taken off and back on between steps, beside one that never was; or, without steps, beside itself."""
    trainable = undisturbed is not None
    with engine_of(checkpoint, trainable=trainable) as engine:
        rows = own_rows(random_experience(), engine)
        expected = undisturbed or {"state": state(engine), "logprobs": engine.forward(rows).logprobs}
        numel = sum(parameter.to_local().numel() for parameter in engine.parameters)
        messages = 0 if engine.scratch is None else engine.scratch.nbytes
        result: dict[str, Any] = {"elements": numel, "given back": engine.offload() - messages}
        result["left"] = sum(p.to_local().untyped_storage().nbytes() for p in engine.parameters)
        try:
            engine.state()
        except RuntimeError as error:
            result["state"] = str(error)
        engine.onload()
        engine.onload()  # nothing is off: nothing happens
        if trainable:
            train(engine, seed=1)
        result["same state"] = same(state(engine), expected["state"])
        result["same outputs"] = torch.equal(engine.forward(rows).logprobs, expected["logprobs"])
    return result


def shares_case(checkpoint: Path) -> dict[str, Any]:
    """Elements of this rank's weights and moments, and of the whole model; bytes read of the checkpoint."""
    from mega_rl.engines.fsdp_weights import load_rows

    with engine_of(checkpoint) as engine:
        held = {piece.name: piece.data.numel() for piece in engine.state().pieces}
        whole_model = sum(weight.numel() for weight in exported(engine).values())
        report = load_rows(engine.model, checkpoint, sharding=engine.sharding)
    weights = sum(count for name, count in held.items() if name.startswith("weights/"))
    return {"weights": weights, "all": sum(held.values()), "model": whole_model, "bytes read": report.bytes_read}


def waits_case(checkpoint: Path) -> dict[str, int]:
    """How often a step asks the device, for which the CPU stands, for positions of the loss and for norms."""
    from mega_rl.engines import fsdp as module

    counts = {"positions": 0, "norms": 0, "micro-batches": 0}
    to_device, gradient_norm, cpu = module.to_device, module.gradient_norm, torch.Tensor.cpu

    class OnDevice(torch.Tensor):
        def nonzero(self, **more: Any) -> Any:  # type: ignore[override]
            counts["positions"] += 1
            return super().nonzero(**more)

    def marked(micros: Any, device: torch.device) -> Iterator[Any]:
        for micro in to_device(micros, device):
            counts["micro-batches"] += 1
            yield dataclasses.replace(micro, fields={k: v.as_subclass(OnDevice) for k, v in micro.fields.items()})

    def counted(self: torch.Tensor) -> torch.Tensor:
        counts["norms"] += 1
        return cpu(self)

    def watched(*args: Any) -> float:
        with patch.object(torch.Tensor, "cpu", counted):
            return gradient_norm(*args)

    patches = patch.object(module, "to_device", marked), patch.object(module, "gradient_norm", watched)
    with engine_of(checkpoint) as engine, patches[0], patches[1]:
        train(engine, seed=1)
    return counts
