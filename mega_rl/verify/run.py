"""Verification of layouts on a checkpoint: the reference first, then one launch per world size."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path

from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.hf.config import read_hf_config
from mega_rl.errors import RunError, UserError
from mega_rl.parallel.accelerator.gpus import gpu_for_each
from mega_rl.tracking import progress
from mega_rl.verify.launcher import RanksFailed, run_ranks
from mega_rl.verify.layouts import Layout
from mega_rl.verify.plan import REFERENCE, LayoutErrors, Plan
from mega_rl.verify.tolerances import Tolerances
from mega_rl.verify.twin.shrink import num_elements, shrink, write_random_twin, write_twin

log = logging.getLogger(__name__)

RANK = "mega_rl.verify.rank"
# A twin with the checkpoint's own weights has its widths; above this number of elements it gets random
# weights and few widths.
MOST_ELEMENTS = 64_000_000


@dataclass(frozen=True)
class Verdict:
    """Result of verifying one layout."""

    layout: Layout
    errors: LayoutErrors | None  # None: its ranks failed
    problems: tuple[str, ...]  # errors out of tolerance, or how the ranks failed; empty: it agrees

    @property
    def good(self) -> bool:
        """Return whether the layout agrees with one rank within the tolerances."""
        return not self.problems


@dataclass(frozen=True)
class Model:
    """The checkpoint that is verified and its description."""

    path: Path
    hf: HFConfig
    description: str


def prepare_model(source: Path, folder: Path, *, twin: bool, multiple: int, seed: int) -> Model:
    """Return the checkpoint itself, or its shrunk twin in `folder`. Raises UserError without weights to verify."""
    hf = read_hf_config(source)
    has_weights = any((source / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json"))
    if not twin:
        if not has_weights:
            raise UserError(f"{source}: holds no safetensors; add --twin to verify a small model of its config.json")
        return Model(source, hf, f"{hf.family}, {hf.num_layers} layers")
    target = folder / "twin"
    own = has_weights and hf.quantization is None
    if own and num_elements(shrink(hf, multiple=multiple).hf) <= MOST_ELEMENTS:
        made, weights = write_twin(source, target, multiple=multiple), "the checkpoint's weights"
    else:
        narrow = num_elements(shrink(hf, multiple=multiple).hf) > MOST_ELEMENTS
        made = write_random_twin(source, target, multiple=multiple, narrow=narrow, seed=seed)
        weights = "random weights" + (f", narrowed to hidden size {made.hf.hidden_size}" if narrow else "")
    kept = ", ".join(map(str, made.layers))
    what = f"twin of {hf.family} with layers {kept} of {hf.num_layers}, {num_elements(made.hf):,} elements"
    return Model(target, made.hf, f"{what}, {weights}")


def use_gpus(layouts: Sequence[Layout]) -> bool:
    """Return whether every layout can have a GPU for each rank; all layouts must run on the same device."""
    return gpu_for_each(max(layout.ranks for layout in layouts))


def verify(
    plan: Plan,
    layouts: Sequence[Layout],
    *,
    tolerances: Tolerances,
    timeout_s: float,
    on_gpus: bool,
) -> list[Verdict]:
    """Return a verdict on each layout, in their order.

    Raises RunError when a single rank cannot compute the model, UserError when it refuses to.
    """
    with progress.rounds("case", len(layouts) + 1) as cases:  # the reference is one
        launch = partial(_launch, plan, timeout_s=timeout_s, on_gpus=on_gpus, cases=cases)
        log.info("1 rank: reference")
        failure = launch((REFERENCE,))
        if failure is not None:
            kind = UserError if failure.blamed == UserError.exit_code else RunError
            raise kind(f"one rank cannot compute {plan.model}: {failure}")
        return _verdicts(plan, layouts, launch, tolerances)


def _verdicts(
    plan: Plan,
    layouts: Sequence[Layout],
    launch: Callable[[tuple[Layout, ...]], RanksFailed | None],
    tolerances: Tolerances,
) -> list[Verdict]:
    """Measure the layouts, those of one world size in one launch."""
    verdicts: dict[str, Verdict] = {}
    for ranks, group in groupby(sorted(layouts, key=lambda layout: layout.ranks), key=lambda layout: layout.ranks):
        pending = list(group)
        while pending:
            log.info("%d rank%s: %s", ranks, "s" * (ranks > 1), ", ".join(layout.name for layout in pending))
            failure = launch(tuple(pending))
            for layout in (layout for layout in pending if plan.answer(layout).exists()):
                errors = LayoutErrors.read(plan.answer(layout))
                verdicts[layout.name] = Verdict(layout, errors, tuple(problems(errors, tolerances)))
            pending = [layout for layout in pending if layout.name not in verdicts]
            if failure is not None and pending:  # the ranks measure in order, so the first one failed
                verdicts[pending[0].name] = Verdict(pending[0], None, (str(failure),))
                del pending[0]
    return [verdicts[layout.name] for layout in layouts]


def _launch(
    plan: Plan, layouts: tuple[Layout, ...], *, timeout_s: float, on_gpus: bool, cases: progress.Phase
) -> RanksFailed | None:
    """Measure layouts of one world size in one launch; return its failure, or None."""
    folder = Path(plan.folder)
    path = folder / "plan.json"
    replace(plan, layouts=layouts).write(path)
    plan.phase.unlink(missing_ok=True)
    before = cases.done
    with progress.phase(f"starting {layouts[0].ranks} ranks") as phase:

        def watch() -> None:
            if plan.phase.exists():
                phase.name = plan.phase.read_text(encoding="utf-8") or phase.name
            cases.report(before + sum(plan.answer(layout).exists() for layout in layouts))

        try:
            run_ranks(
                RANK,
                [str(path)],
                ranks=layouts[0].ranks,
                logs=folder,
                timeout_s=timeout_s,
                use_gpus=on_gpus,
                watch=watch,
            )
        except RanksFailed as failure:
            return failure
        finally:
            measured = sum(layout == REFERENCE or plan.answer(layout).exists() for layout in layouts)
            cases.report(before + measured)
    return None


def problems(errors: LayoutErrors, allowed: Tolerances) -> list[str]:
    """Return the errors out of tolerance, in words; an infinite error stands for one that is not a number."""
    lines = []

    def check(what: str, error: float, limit: float) -> None:
        if not error <= limit:
            lines.append(f"{what} {error:.2g} > {limit:g}")

    check("log-probs", errors.logprob_error, allowed.logprob)
    check("loss", errors.loss_error, allowed.loss)
    check("gradient norm", errors.grad_norm_error, allowed.grad_norm)
    for entry in errors.gradients[:1]:
        check(f"gradient of {entry.name}", entry.error, allowed.gradient)
    for entry in errors.weights[:1]:
        check(f"step of {entry.name}", entry.error, allowed.weight)
    for entry in errors.copies[:1]:
        check(f"ranks disagree on the gradient of {entry.name}", entry.error, allowed.gradient)
    return lines


def working_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a temporary folder for the twin, the reference and the answers."""
    return tempfile.TemporaryDirectory(prefix="verify_")
