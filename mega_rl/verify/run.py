"""Verify layouts on a checkpoint: the reference first, then one launch per world size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import TypeAlias

from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.hf.config import read_hf_config
from mega_rl.converters.plan.parameters import num_elements
from mega_rl.errors import UserError
from mega_rl.tracking import progress
from mega_rl.verify.launcher import RanksFailed, run_task
from mega_rl.verify.layouts import Layout, LayoutErrors, Plan, resolve_all, stages
from mega_rl.verify.twin import shrink, write_random_twin, write_small, write_twin

# A twin with the checkpoint's own weights has its widths; above this number of elements it gets random
# weights and few widths.
MOST_ELEMENTS = 64_000_000


# A layout, its errors (None: its ranks failed), and the problems: errors out of tolerance, or how the ranks failed.
Verdict: TypeAlias = tuple[Layout, LayoutErrors | None, list[str]]


def prepare_model(source: Path, folder: Path, *, twin: bool, multiple: int, seed: int) -> tuple[Path, str]:
    """Return the checkpoint or its shrunk twin in `folder`, described. Raises UserError without weights to verify."""
    hf = read_hf_config(source, any_model=twin)
    target = folder / "twin"
    if hf.own is not None:
        return target, f"small {hf.family} of {write_small(source, target, seed=seed):,} random elements"
    has_weights = any((source / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json"))
    if not twin:
        if not has_weights:
            raise UserError(f"{source}: holds no safetensors; add --twin to verify a small model of its config.json")
        return source, f"{hf.family}, {hf.num_layers} layers"
    narrow = num_elements(shrink(hf, multiple=multiple).hf) > MOST_ELEMENTS
    if has_weights and hf.quantization is None and not narrow:
        made, weights = write_twin(source, target, multiple=multiple), "the checkpoint's weights"
    else:
        made = write_random_twin(source, target, multiple=multiple, narrow=narrow, seed=seed)
        weights = "random weights" + (f", narrowed to hidden size {made.hf.hidden_size}" if narrow else "")
    kept = ", ".join(map(str, made.layers))
    what = f"twin of {hf.family} with layers {kept} of {hf.num_layers}, {num_elements(made.hf):,} elements"
    return target, f"{what}, {weights}"


def verify(
    plan: Plan, layouts: Sequence[Layout], *, tolerances: Mapping[str, float], timeout_s: float, on_gpus: bool
) -> list[Verdict]:
    """Measure the reference, then the layouts of each world size in one launch; return verdicts.

    Raises RunError when a single rank cannot compute the model, UserError when it refuses to.
    """
    verdicts: dict[str, Verdict] = {}
    with progress.rounds("case", len(layouts) + 1) as cases:  # the reference is one

        def launch(measured: Sequence[Layout], label: str) -> None:
            before = cases.done

            def count() -> None:
                cases.report(before + sum(plan.answer(layout).exists() for layout in measured))

            task, folder, size = asdict(replace(plan, layouts=tuple(measured))), Path(plan.folder), measured[0].ranks
            try:
                run_task(
                    "measure", task, folder, label=label, ranks=size, timeout_s=timeout_s, use_gpus=on_gpus, watch=count
                )
            finally:
                count()

        try:
            launch([plan.reference], "reference")
        except (UserError, RanksFailed) as error:
            raise type(error)(f"one rank cannot compute {plan.model}: {error}") from error
        cases.advance()
        pending = sorted(layouts, key=lambda layout: layout.ranks)
        while pending:
            measured, failure = [layout for layout in pending if layout.ranks == pending[0].ranks], ""
            try:
                launch(measured, ", ".join(layout.name for layout in measured))
            except (UserError, RanksFailed) as error:
                failure = str(error)
            answered = [layout for layout in measured if plan.answer(layout).exists()]
            for layout in answered:
                errors = LayoutErrors.read(plan.answer(layout))
                verdicts[layout.name] = (layout, errors, problems(errors, tolerances))
            pending = [layout for layout in pending if layout not in answered]
            if failure and len(answered) < len(measured):  # the ranks measure in order, so the first one failed
                failed = pending.pop(0)
                verdicts[failed.name] = (failed, None, [failure])
    return [verdicts[layout.name] for layout in layouts]


def resolve_on_twin(names: str, hf: HFConfig, *, where: str, nproc: int | None = None) -> tuple[list[Layout], int]:
    """Return (layouts that model and twin can have, number that divides the twin's layers)."""
    layers = stages(names)
    made = shrink(hf, where=where, multiple=layers).hf
    # A layout that fits the twin only would prove nothing about the model. The twin's layers may be cut unevenly.
    resolve_all(names, replace(hf, num_layers=made.num_layers), nproc=nproc)
    return resolve_all(names, made, nproc=nproc), layers


def problems(errors: LayoutErrors, allowed: Mapping[str, float]) -> list[str]:
    """Return the errors out of tolerance, in words; an infinite error was not a number.

    allowed: by kind; errors of other kinds pass.
    """
    measured = [
        (f"tensors not exported bit for bit ({', '.join(errors.lost[:3])})", float(len(errors.lost)), "bits"),
        ("log-probs", errors.logprob_error, "logprob"),
        ("loss", errors.loss_error, "loss"),
        ("gradient norm", errors.grad_norm_error, "grad_norm"),
    ]
    for what, tensors, kind in (
        ("gradient of", errors.gradients, "gradient"),
        ("step of", errors.weights, "weight"),
        ("ranks disagree on the gradient of", errors.copies, "gradient"),
    ):
        measured += [(f"{what} {name}", error, kind) for name, error in islice(tensors.items(), 1)]
    judged = [(what, error, allowed[kind]) for what, error, kind in measured if kind in allowed]
    return [f"{what} {error:.2g} > {most:g}" for what, error, most in judged if not error <= most]
