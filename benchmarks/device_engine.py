"""Parts of device.py that run an engine: whole training steps, turns, rollouts, and their log-prob mismatch."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from device_micro import DEVICE, GPU, Record, synchronize, timed

PEAK_BF16 = 989e12  # of an H200 without sparsity, in FLOP/s
MICROBATCHES = 2


class Shape(NamedTuple):
    """Sizes of a Qwen3 model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    tied: bool = True
    head_dim: int = 128
    vocab: int = 151936


SHAPES = {
    "tiny": Shape(64, 2, 4, 2, 128, head_dim=16, vocab=500),
    "0.6b": Shape(1024, 28, 16, 8, 3072),
    "1.7b": Shape(2048, 28, 16, 8, 6144),
    "4b": Shape(2560, 36, 32, 8, 9728),
}
# engine, shape, tokens of a micro-batch, recompute
STEPS = (
    ("megatron", "1.7b", 8192, "none"),
    ("fsdp", "1.7b", 8192, "none"),
    ("megatron", "4b", 16384, "full"),
)


def write_model(folder: Path, shape: Shape) -> None:
    """Write a checkpoint of random bf16 weights, made on the device."""
    from safetensors.torch import save_file

    from mega_rl.converters.hf.config import read_hf_config
    from mega_rl.converters.plan.parameters import hf_tensors

    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "tie_word_embeddings": shape.tied,
        "eos_token_id": shape.vocab - 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator(device=DEVICE).manual_seed(0)

    def values(tensor_shape: tuple[int, ...]) -> torch.Tensor:
        empty = torch.empty(tensor_shape, dtype=torch.bfloat16, device=DEVICE)
        return (empty.fill_(1.0) if len(tensor_shape) == 1 else empty.normal_(0, 0.02, generator=generator)).cpu()

    shapes = {name: tensor.shape for name, tensor in hf_tensors(read_hf_config(folder), head="lm").items()}
    save_file({name: values(one) for name, one in shapes.items()}, folder / "model.safetensors")


@contextmanager
def running_actor(
    shape: str, *, tokens: int, recompute: str = "none", backend: str = "megatron"
) -> Iterator[tuple[Any, Path]]:
    """Yield (engine of one rank, folder of its checkpoint)."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    from mega_rl.config.schema import Config, EngineConfig, MicrobatchConfig, ModelConfig, OptimConfig, TrainerConfig
    from mega_rl.trainer.assemble import build_actor, session

    with tempfile.TemporaryDirectory(prefix="device_") as name:
        write_model(Path(name), SHAPES[shape])
        config = Config(
            model=ModelConfig(path=name, dtype="bf16", recompute=recompute),
            engine=EngineConfig(backend=backend),
            optim=OptimConfig(lr=1e-6),
            trainer=TrainerConfig(microbatch=MicrobatchConfig(max_tokens=tokens)),
        )
        with session(config, accelerator) as groups:
            yield build_actor(config, groups, accelerator), Path(name)


def experience(tokens: int, vocab: int) -> Any:
    """Return rows of mixed lengths that fill the micro-batches, with advantages of 1."""
    from mega_rl.types import Experience, response_mask

    generator = torch.Generator().manual_seed(1)
    lengths: list[int] = []
    while sum(lengths) < tokens * MICROBATCHES * 0.97:
        lengths.append(int(torch.randint(max(8, tokens // 32), max(16, tokens // 4), (1,), generator=generator)))
    rows, width = len(lengths), max(lengths)
    counts, prompts = torch.tensor(lengths), torch.full((rows,), 4)
    mask = response_mask(prompts, counts, width=width)
    return Experience.from_rows(
        torch.randint(1, vocab, (rows, width), generator=generator),
        prompt_lengths=prompts,
        lengths=counts,
        advantages=torch.ones(rows, width),
        loss_weights=mask / mask.sum(),
        token_weights=mask / mask.sum(),
    )


def training_flops(shape: Shape, lengths: list[int]) -> float:
    """Return the floating-point operations of a forward and backward: 6 a parameter and token, and causal attention."""
    attention = 2 * shape.hidden * shape.head_dim * (shape.heads + shape.kv_heads)
    parameters = shape.layers * (attention + 3 * shape.hidden * shape.ffn) + shape.vocab * shape.hidden
    products = 6 * shape.layers * shape.heads * shape.head_dim  # causal: half of 12
    return 6.0 * parameters * sum(lengths) + float(products) * sum(length**2 for length in lengths)


def step(*, tiny: bool) -> Iterator[Record]:
    """Training steps and log-prob passes against the peak of bf16, and the turns of a real engine."""
    from mega_rl.algorithms.policy_losses import PPO
    from mega_rl.workers.models import PolicyLoss

    loss = PolicyLoss(PPO(clip_high=0.28, dual_clip=0.0), kl=None, kl_estimator="k3", on_policy=True)
    small = [(backend, "tiny", 128, "none") for backend in ("megatron", "fsdp")]
    for backend, name, tokens, recompute in small if tiny else STEPS:
        with running_actor(name, tokens=tokens, recompute=recompute, backend=backend) as (engine, _):
            batch = experience(tokens, SHAPES[name].vocab)
            timings = _timings(engine, batch, loss, rounds=1 if tiny else 3)
            case = {"engine": backend, "shape": name}
            yield case | {"recompute": recompute} | _speeds(SHAPES[name], batch.lengths.tolist(), *timings)
            yield case | _turn(engine)  # makes the places on the host
            engine.train_minibatch(batch, loss, lr=1e-6)
            yield case | {f"kept_{key}": value for key, value in _turn(engine).items()}


def _timings(engine: Any, batch: Any, loss: Any, *, rounds: int) -> tuple[float, float]:
    """Return the seconds of (a training step, a log-prob pass)."""
    if GPU:
        torch.cuda.reset_peak_memory_stats()
    warmup = 6 if GPU else 1  # a kernel compiles for the first sizes
    trained = timed(lambda: engine.train_minibatch(batch, loss, lr=1e-6), rounds=rounds, warmup=warmup)
    return trained, timed(lambda: engine.forward(batch), rounds=rounds, warmup=1)


def _speeds(shape: Shape, lengths: list[int], trained: float, forward: float) -> Record:
    flops = training_flops(shape, lengths)
    return {
        "tokens": sum(lengths),
        "tokens_per_s": sum(lengths) / trained,
        "mfu": flops / trained / PEAK_BF16,
        "logprob_mfu": flops / 3 / forward / PEAK_BF16,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if GPU else 0.0,
    }


def _turn(engine: Any) -> Record:
    """Seconds of one turn of a whole engine to the host and back."""
    begin = time.perf_counter()
    freed = engine.offload()
    synchronize()
    middle = time.perf_counter()
    engine.onload()
    synchronize()
    return {"turn_gb": freed / 1e9, "turn_off_s": middle - begin, "turn_on_s": time.perf_counter() - middle}


def rollout(*, tiny: bool) -> Iterator[Record]:
    """The embedded engine: weight sync, tokens per second, and how far its log-probs are from the trainer's."""
    from mega_rl.rollout.embedded import EmbeddedWeightSync, HFRolloutEngine
    from mega_rl.rollout.sampling import Sampler
    from mega_rl.types import Prompt

    new, batch = (8, 4) if tiny else (256, 256)
    for name in ("tiny",) if tiny else ("0.6b", "4b"):
        with running_actor(name, tokens=1024 if tiny else 8192) as (engine, folder):
            sampler = Sampler(temperature=1.0, top_p=1.0, top_k=0)
            embedded = HFRolloutEngine(
                folder, dtype=torch.bfloat16, device=DEVICE, sampler=sampler, max_new_tokens=new,
                stop_token_ids=[], batch_size=batch,
            )  # fmt: skip
            sync = EmbeddedWeightSync(engine.export_weights, embedded, verify_interval=1000)
            sync.publish()  # with checksums
            begin = time.perf_counter()
            sent = sync.publish()["sync/bytes"]
            synchronize()
            publish_s = time.perf_counter() - begin
            prompts = [Prompt(index=i, token_ids=tuple(range(1, 33)), text="", answer=None) for i in range(batch)]
            begin = time.perf_counter()
            rows = embedded.generate(prompts, list(range(batch)), n=1, seed=(0, 0))
            seconds = time.perf_counter() - begin
            difference = (engine.forward(rows).logprobs - rows.rollout_logprobs)[rows.loss_mask].abs()
            yield {
                "shape": name,
                "publish_gb_s": sent / publish_s / 1e9,
                "tokens_per_s": float(rows.loss_mask.sum()) / seconds,
                "ms_per_token" if name == "0.6b" else "ms_per_token_of_this_shape": seconds / new * 1e3,
                "mismatch_mean": float(difference.mean()),
                "mismatch_p999": float(difference.quantile(0.999)),
                "mismatch_max": float(difference.max()),
            }
