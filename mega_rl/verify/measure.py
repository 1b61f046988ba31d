"""Measurement of layouts by the engine and loss of training, and comparison with one rank."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from mega_rl.algorithms.kl import KLController, k3
from mega_rl.algorithms.policy_losses import PPO
from mega_rl.config.needs import RequestedAttention
from mega_rl.config.schema import (
    EngineConfig,
    MegatronConfig,
    MegatronOptimizerConfig,
    MicrobatchConfig,
    ModelConfig,
    OptimConfig,
    RolloutConfig,
)
from mega_rl.converters.hf.config import read_hf_config
from mega_rl.converters.hf.untabled import accepted
from mega_rl.converters.safetensors.reader import CheckpointReader
from mega_rl.ddp.access import local, named_parameters
from mega_rl.disk import replace_text
from mega_rl.engines.base import EngineSettings, ModelEngine
from mega_rl.engines.build import build_engine, resolve_model
from mega_rl.engines.fsdp import FSDPEngine
from mega_rl.engines.megatron import MegatronEngine
from mega_rl.parallel import groups as process_groups
from mega_rl.parallel.accelerator import Accelerator
from mega_rl.parallel.accelerator.base import distance, norm
from mega_rl.parallel.comm import GroupRanks
from mega_rl.types import Experience, response_mask
from mega_rl.untrusted import read_record
from mega_rl.verify.layouts import REFERENCE, TRANSFORMERS, Layout, LayoutErrors, Plan, finite
from mega_rl.verify.rl.independent.formulas import clipped_term, kl_term
from mega_rl.verify.rl.independent.records import NamedSettings
from mega_rl.verify.twin import as_saved, load_transformers
from mega_rl.workers.models import PolicyLoss

GRADIENT, MOVED, START = "gradient/", "moved/", "start/"
# The step is long, so that a weight goes a way that its own rounding cannot hide, and Adam's eps is the size of an
# average gradient, so that the step follows the gradient. With a usual eps Adam's first step is the gradient's sign,
# and of an element that is nearly zero rounding decides the sign.
STEP = 64.0
# Learning rate of several steps: they must not lead the model away, or gradients would be those of another model.
SHORT_STEP = 1e-2
# Share of a weight's size by which rounding it on both sides may change one step.
ROUNDING = {"bf16": 2.0**-8, "fp32": 2.0**-24}
# A tensor whose gradient is this much smaller than that of the average element is compared with that size instead of
# its own: what is left of sums that cancel is rounding.
FLOOR = 1e-4
ROWS, LONGEST, SHORTEST = 16, 32, 6
TOKENS_PER_MICROBATCH = 2 * LONGEST
# Distances of the old log-probs: well inside the clip range of the loss, and well beyond it. At its edges the gradient
# jumps, and rounding would decide on which side a token falls.
INSIDE, BEYOND = 0.05, 0.6
CLIPS = NamedSettings("ppo", {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 3.0})
KL_COEF, ENTROPY_COEF = 0.1, 0.01


def run_task(arguments: object, accelerator: Accelerator) -> None:
    """Measure the layouts of a plan in JSON."""
    measure(read_record(Plan, arguments), accelerator)


def measure(plan: Plan, accelerator: Accelerator) -> None:
    """Measure every layout of the plan; rank 0 writes the answers. Collective over the world."""
    for layout in plan.layouts:
        if layout == plan.reference:
            write_reference(plan, accelerator)
            continue
        errors = compare(plan, layout, accelerator)
        if os.environ.get("RANK", "0") == "0":
            replace_text(plan.answer(layout), json.dumps(asdict(errors)))


def write_reference(plan: Plan, accelerator: Accelerator) -> None:
    """Compute the reference and write its tensors and facts."""
    tensors, facts = by_transformers(plan) if plan.reference == TRANSFORMERS else by_one_rank(plan, accelerator)
    save_file(tensors, plan.reference_tensors)
    plan.reference_facts.write_text(json.dumps(facts), encoding="utf-8")


def by_one_rank(plan: Plan, accelerator: Accelerator) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return (tensors, facts) of one rank of Megatron-Core, with the plain optimizer."""
    tensors: dict[str, Tensor] = {}
    with engine_of(plan, REFERENCE, accelerator, OptimConfig(clip_grad=0.0), distributed=False) as engine:
        batch = random_batch(engine.sharding.hf.vocab_size, seed=plan.seed)
        logprobs = engine.forward(batch).logprobs
        assert logprobs is not None
        batch = with_old_logprobs(batch, logprobs, seed=plan.seed)
        metrics = engine.train_minibatch(batch, policy_loss(), lr=0.0)
        tensors |= {GRADIENT + name: kept(gradient) for name, gradient in exported_gradients(engine)}
    numel = sum(tensor.numel() for tensor in tensors.values())
    grad_norm = metrics["grad_norm"]
    facts = {"loss": metrics["actor/loss"], "grad_norm": grad_norm, "typical": grad_norm / numel**0.5}
    with engine_of(plan, REFERENCE, accelerator, step_settings(facts), distributed=False) as engine:
        start = {name: kept(weight) for name, weight in engine.export_weights()}
        facts["step_norms"] = train(engine, batch, plan)
        for name, weight in engine.export_weights():
            tensors[START + name] = start[name]
            tensors[MOVED + name] = kept(weight) - start[name]
    tensors |= {"logprobs": logprobs, "old_logprobs": batch.old_logprobs, "ref_logprobs": batch.ref_logprobs}
    return tensors, facts


def by_transformers(plan: Plan) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return (tensors, facts) of transformers' own model: `policy_loss` by independent formulas, Adam's first step.

    The fact "renamed" lists tensors that transformers loads under other names or with other bits.
    """
    model = load_transformers(plan.model, torch.float32)
    model.get_input_embeddings().padding_idx = None  # type: ignore[assignment]  # a token like any other here
    batch = random_batch(read_hf_config(plan.model, any_model=True).vocab_size, seed=plan.seed)
    rows = [(row, int(length)) for row, length in enumerate(batch.lengths)]
    with torch.no_grad():
        own = [token_logprobs(model, batch.tokens[row], length)[0] for row, length in rows]
    logprobs = torch.stack(own) * batch.loss_mask
    batch, loss = with_old_logprobs(batch, logprobs, seed=plan.seed), 0.0
    for row, length in rows:
        now, entropy = token_logprobs(model, batch.tokens[row], length)
        names = ("advantages", "loss_weights", "old_logprobs", "ref_logprobs")
        advantages, weights, old, ref = (getattr(batch, name)[row] for name in names)
        ratio = (now - old).exp()
        clipped, away = clipped_term(ratio, advantages, CLIPS), kl_term("k3", now, ref, ratio)
        total = ((clipped + KL_COEF * away - ENTROPY_COEF * entropy) * weights).sum()
        total.backward()
        loss += float(total.detach())
    named = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    gradients = {name: kept(gradient).contiguous() for name, gradient in as_saved(model, named).items()}
    loaded = as_saved(model, model.state_dict())
    with CheckpointReader(plan.model) as reader:
        start = {name: reader.read(name).float() for name in reader.tensors}
    size = norm(torch.cat([gradient.flatten() for gradient in gradients.values()]).double())
    typical = size / sum(gradient.numel() for gradient in gradients.values()) ** 0.5
    facts = {"loss": loss, "grad_norm": size, "typical": typical, "step_norms": [size]}
    facts["renamed"] = [name for name in start if name not in loaded or not torch.equal(start[name], loaded[name])]
    tensors = {"logprobs": logprobs, "old_logprobs": batch.old_logprobs, "ref_logprobs": batch.ref_logprobs}
    for name, weight in start.items():
        clipped = gradients[name] / 2 if name in gradients else torch.zeros_like(weight)
        tensors |= {START + name: weight, MOVED + name: -STEP * clipped / (clipped.abs() + typical / 2)}
    return tensors | {GRADIENT + name: gradient for name, gradient in gradients.items()}, facts


def token_logprobs(model: PreTrainedModel, tokens: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return (log-prob, entropy) of a row's tokens, [S] each: 0 for the first and beyond `length`."""
    inputs = accepted(model, {"use_cache": False})
    predicted = model(tokens[None, :length], **inputs).logits[0, :-1].float().log_softmax(-1)
    chosen = predicted.gather(1, tokens[1:length, None])[:, 0]
    entropy = -(predicted.exp() * predicted).sum(-1)
    around = (1, len(tokens) - length)
    return torch.nn.functional.pad(chosen, around), torch.nn.functional.pad(entropy, around)


def compare(plan: Plan, layout: Layout, accelerator: Accelerator) -> LayoutErrors:
    """Return the distance of `layout` from the reference; collective, valid on rank 0."""
    facts = json.loads(plan.reference_facts.read_text(encoding="utf-8"))
    floor = FLOOR * facts["typical"]
    with safe_open(plan.reference_tensors, framework="pt") as reference:
        with engine_of(plan, layout, accelerator, OptimConfig(clip_grad=0.0), distributed=False) as engine:
            batch = random_batch(engine.sharding.hf.vocab_size, seed=plan.seed)
            batch.old_logprobs = reference.get_tensor("old_logprobs")
            batch.ref_logprobs = reference.get_tensor("ref_logprobs")
            ranks = engine.data_parallel
            first, last = (len(batch.tokens) * (ranks.rank + i) // ranks.size for i in range(2))
            rows: Experience = batch[first:last]  # type: ignore[index]
            own = engine.forward(rows).logprobs
            assert own is not None
            logprobs = own.new_zeros(len(batch.tokens), own.size(1))
            logprobs[first:last] = own
            logprobs = ranks.sum(logprobs)
            metrics = engine.train_minibatch(rows, policy_loss(), lr=0.0)
            copies = disagreements(engine, floor)
            gradients = {
                name: distance(kept(gradient), reference.get_tensor(GRADIENT + name), floor=floor)
                for name, gradient in exported_gradients(engine)
            }
        with engine_of(plan, layout, accelerator, step_settings(facts)) as engine:
            lost = lost_tensors(engine, reference) if plan.dtype == "fp32" else []
            step_norms = train(engine, rows, plan)
            rounding, length = plan.steps * ROUNDING[plan.dtype], plan.steps * step_length(plan)
            weights = {}
            for name, weight in engine.export_weights():
                start, moved = reference.get_tensor(START + name), reference.get_tensor(MOVED + name)
                weights[name] = step_error(kept(weight), start, moved, length=length, rounding=rounding)
        logprob_error = finite(float((logprobs - reference.get_tensor("logprobs")).abs().max()))
    expected = [facts["grad_norm"], *facts["step_norms"]]
    norms = [relative(*pair) for pair in zip([metrics["grad_norm"], *step_norms], expected, strict=True)]
    return LayoutErrors(
        logprob_error=logprob_error,
        loss=metrics["actor/loss"],
        loss_error=relative(metrics["actor/loss"], facts["loss"]),
        grad_norm_error=max(norms),
        gradients=ranked(gradients),
        weights=ranked(weights),
        copies=copies,
        lost=lost,
        num_microbatches=int(metrics["num_microbatches"]),
    )


def lost_tensors(engine: ModelEngine, reference: Any) -> list[str]:
    """Return the tensors of an open reference that are not exported bit for bit; collective."""
    lost = {name.removeprefix(START) for name in reference.keys() if name.startswith(START)}  # noqa: SIM118
    for name, weight in engine.export_weights():
        if name in lost and torch.equal(kept(weight), reference.get_tensor(START + name)):
            lost.remove(name)
    return sorted(lost)


@contextmanager
def engine_of(
    plan: Plan, layout: Layout, accelerator: Accelerator, optim: OptimConfig, *, distributed: bool = True
) -> Iterator[ModelEngine]:
    """Yield a trainable engine of the plan's model on this rank, and destroy its groups afterwards.

    distributed: Megatron-Core's optimizer state is sharded.
    """
    megatron = MegatronConfig(
        **layout.settings,
        transformer_impl=plan.transformer_impl,
        optimizer=MegatronOptimizerConfig(distributed=distributed),
    )
    rollout = RolloutConfig()
    settings = EngineSettings(
        engine=EngineConfig(backend=layout.engine, megatron=megatron),
        model=ModelConfig(path=plan.model, dtype=plan.dtype),
        optim=optim,
        microbatch=MicrobatchConfig(packing=plan.packing, max_tokens=TOKENS_PER_MICROBATCH, size=2),
        deterministic=False,
        timeout_s=plan.timeout_s,
        temperature=rollout.temperature,
        export_bucket_bytes=rollout.bucket_mib << 20,
    )
    model = resolve_model(
        "actor",
        Path(plan.model),
        head="lm",
        trainable=True,
        settings=settings,
        attention=RequestedAttention(settings.model.attn_implementation, "model.attn_implementation"),
        device_type=accelerator.device.type,
    )
    groups = process_groups.initialize(layout.parallel_layout(), accelerator=accelerator, timeout_s=plan.timeout_s)
    try:
        process_groups.seed_model_parallel(plan.seed, groups)
        yield build_engine(model, settings=settings, groups=groups, accelerator=accelerator)
    finally:
        process_groups.destroy()


def train(engine: ModelEngine, batch: Experience, plan: Plan) -> list[float]:
    """Run the plan's steps, all on one batch; return their gradient norms."""
    steps = [engine.train_minibatch(batch, policy_loss(), lr=step_length(plan)) for _ in range(plan.steps)]
    return [metrics["grad_norm"] for metrics in steps]


def step_length(plan: Plan) -> float:
    """Return the learning rate of the measured step."""
    return STEP if plan.steps == 1 else SHORT_STEP


def step_settings(facts: dict[str, Any]) -> OptimConfig:
    """Return Adam's settings: it clips to half of the reference's norm, with the eps of `STEP`."""
    return OptimConfig(clip_grad=facts["grad_norm"] / 2, eps=facts["typical"] / 2)


def policy_loss() -> PolicyLoss:
    """Return the clipped policy objective with all of its terms."""
    objective = PPO(**CLIPS.numbers)
    return PolicyLoss(objective, kl=KLController(KL_COEF), kl_estimator=k3, entropy_coef=ENTROPY_COEF)


def exported_gradients(engine: ModelEngine) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, float32 main gradient) of every weight; collective.

    Gradients stand in the place of weights while the exporter reads them. Megatron-Core's must be whole on every rank:
    `engine.megatron.optimizer.distributed=False`.
    """
    exporter = engine
    if isinstance(engine, FSDPEngine):
        exporter, parameters = replace(engine, dtype=torch.float32), engine.parameters
        held = [parameter._local_tensor for parameter in parameters]  # to_local would return views
        gradients = [None if parameter.grad is None else local(parameter.grad) for parameter in parameters]
    else:
        assert isinstance(engine, MegatronEngine)
        held = [parameter for chunk in engine.models for parameter in chunk.parameters()]
        gradients = [vars(parameter).get("main_grad") for parameter in held]
    weights = [parameter.data for parameter in held]
    try:
        for parameter, gradient in zip(held, gradients, strict=True):  # frozen ones have none
            parameter.data = torch.zeros_like(parameter) if gradient is None else gradient.float()
        yield from ((name, tensor) for name, tensor in exporter.export_weights() if not name.endswith(CONSTANTS))
    finally:
        for parameter, weight in zip(held, weights, strict=True):
            parameter.data = weight


# A router's bias, which is set and not learnt, and numbers of an activation.
CONSTANTS = ("e_score_correction_bias", ".expert_bias", ".act_fn.beta", ".act_fn.eps")


def disagreements(engine: ModelEngine, floor: float) -> dict[str, float]:
    """Return gradients that differ between ranks with the same weight, under Megatron-Core's names, worst first.

    The exporter takes one rank's gradient. Under FSDP no two ranks hold the same. Collective.
    """
    if not isinstance(engine, MegatronEngine):
        return {}
    layout = engine.groups.layout
    own: dict[str, float] = {}
    for name, parameter in ((n, p) for n, p in named_parameters(engine.models) if p.requires_grad):
        gradient = vars(parameter)["main_grad"].detach().float()
        is_expert = ".mlp.experts." in name
        is_cut = getattr(parameter, "tensor_model_parallel", False)
        groups = [engine.groups.collection.expt_dp if is_expert else engine.groups.dp_cp]
        if layout.tp > 1 and not is_expert and not is_cut:
            groups.append(engine.groups.tp)
        for group in groups:
            if error := distance(gradient, GroupRanks(group).broadcast(gradient), floor=floor):
                own[name] = max(own.get(name, 0.0), error)
    every = [entry for errors in GroupRanks(engine.groups.world).gather_json(own) for entry in errors.items()]
    return ranked(dict(sorted(every, key=lambda entry: entry[1])))  # the last of a name stays, the largest


def random_batch(vocab_size: int, *, seed: int) -> Experience:
    """Return `ROWS` rows of random tokens and advantages; old and reference log-probs are 0."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    lengths = integers(SHORTEST, LONGEST + 1, ROWS)
    lengths[0] = LONGEST
    prompt_lengths = integers(2, SHORTEST - 1, ROWS)
    mask = response_mask(prompt_lengths, lengths, width=LONGEST)
    weights = mask.float() / mask.sum()
    return Experience.from_rows(
        integers(0, vocab_size, ROWS, LONGEST) * (torch.arange(LONGEST) < lengths[:, None]),
        prompt_lengths=prompt_lengths,
        lengths=lengths,
        # Their mean is 1: a loss whose terms cancel would be known to fewer digits than its gradient.
        advantages=(1 + torch.randn(ROWS, LONGEST, generator=generator)) * mask,
        loss_weights=weights,
        token_weights=weights,
    )


def with_old_logprobs(batch: Experience, logprobs: Tensor, *, seed: int) -> Experience:
    """Return the batch with old and reference log-probs around `logprobs` [B, S] of one rank."""
    generator = torch.Generator().manual_seed(seed + 1)

    def distances() -> Tensor:
        far = torch.rand(logprobs.shape, generator=generator) < 0.3
        sign = torch.randint(0, 2, logprobs.shape, generator=generator) * 2 - 1
        return sign * torch.where(far, BEYOND, INSIDE)

    changed: Experience = batch.clone()  # type: ignore[attr-defined]
    changed.old_logprobs = (logprobs + distances()) * batch.loss_mask
    changed.ref_logprobs = (logprobs + distances()) * batch.loss_mask
    return changed


def kept(tensor: Tensor) -> Tensor:
    """Return a float32 copy on the host."""
    return tensor.detach().to("cpu", torch.float32, copy=True)


def step_error(weight: Tensor, start: Tensor, moved: Tensor, *, length: float, rounding: float) -> float:
    """Return a weight's distance from `start + moved`, relative to `moved`, less its rounding.

    length: learning rate times steps; a small `moved` is bounded by `FLOOR` of it.
    """
    hidden = rounding * norm((start + moved).double())
    gap = norm(weight.double() - start.double() - moved.double())
    floor = FLOOR * length * moved.numel() ** 0.5
    return finite(max(gap - hidden, 0.0) / max(norm(moved.double()), floor)) if gap else 0.0


def relative(actual: float, expected: float) -> float:
    """Return |actual - expected| / |expected|."""
    return finite(abs(actual - expected) / max(abs(expected), 1e-30))


def ranked(errors: dict[str, float]) -> dict[str, float]:
    """Return the errors, the largest first."""
    return dict(sorted(errors.items(), key=lambda entry: -entry[1]))
