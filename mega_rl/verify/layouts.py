"""Layouts to verify by names as "tp2+sp", and files of a verification's tasks and answers.

docs/verify.md says what a name implies. Sends of virtual stages overlap with compute, without which two stages would be
wrong.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.plan.sharding import check_layout
from mega_rl.errors import UserError, UserErrors
from mega_rl.parallel.layout import ParallelLayout

TOKEN = re.compile(r"(vpp|etp|tp|pp|cp|ep|dp)([1-9]\d{0,3})|(sp)")
NAME = re.compile(rf"(?:{TOKEN.pattern})(?:[+-]?(?:{TOKEN.pattern}))*")
ALL = "tp2,tp2+sp,pp2,vpp2,cp2,ep2,ep2+etp2,tp2+ep2+sp,tp2+pp2,cp2+tp2,dp2,dp4"
FSDP = re.compile(r"fsdp([1-9]\d?)")
MAX_RANKS = 64


@dataclass(frozen=True)
class Layout:
    """A layout under the name that the user gave it."""

    name: str
    tp: int = 1
    sp: bool = False
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    engine: str = "megatron"
    implied: tuple[str, ...] = ()  # sizes that the name omits, as words of a name

    @property
    def ranks(self) -> int:
        """Return the world size."""
        return self.pp * math.lcm(self.tp * self.cp * self.dp, self.ep * self.etp)

    @property
    def title(self) -> str:
        """Return the name, with implied sizes in brackets."""
        return self.name + (f" ({'+'.join(self.implied)})" if self.implied else "")

    @property
    def settings(self) -> dict[str, Any]:
        """Return the fields of `mega_rl.config.schema.MegatronConfig`."""
        return {
            **{name: getattr(self, name) for name in ("tp", "pp", "vpp", "cp", "ep", "etp")},
            "sequence_parallel": self.sp,
        }

    def parallel_layout(self) -> ParallelLayout:
        """Return the arithmetic of its ranks."""
        return ParallelLayout(world_size=self.ranks, **self.settings)


REFERENCE = Layout("1")
TRANSFORMERS = Layout("transformers", engine="transformers")  # transformers' own model, row by row


@dataclass(frozen=True)
class Plan:
    """Task of ranks: one model, and layouts to measure in one world."""

    model: str  # Hugging Face folder
    folder: str  # holds the reference and the answers
    layouts: tuple[Layout, ...]  # all of one world size; the reference is measured before all others
    reference: Layout = REFERENCE
    dtype: str = "fp32"  # "fp32" or "bf16"
    transformer_impl: str = "auto"
    packing: bool = True
    steps: int = 1  # optimizer steps before weights are compared
    seed: int = 0
    timeout_s: float = 600.0  # deadline of each collective

    @property
    def reference_tensors(self) -> Path:
        """Return the file of the reference's tensors and log-probs."""
        return Path(self.folder) / "reference.safetensors"

    @property
    def reference_facts(self) -> Path:
        """Return the file of the reference's loss and norms."""
        return Path(self.folder) / "reference.json"

    def answer(self, layout: Layout) -> Path:
        """Return the file of a layout's result."""
        return Path(self.folder) / f"{layout.name}.json"


@dataclass(frozen=True)
class LayoutErrors:
    """Distances of one layout from one rank; tensors by Hugging Face name, the worst first."""

    logprob_error: float  # nats, the largest of any token
    loss: float
    loss_error: float  # relative
    grad_norm_error: float  # relative, the largest of all steps of the two optimizers
    gradients: Mapping[str, float]  # relative
    weights: Mapping[str, float]  # relative
    copies: Mapping[str, float]  # gradients that differ between ranks with the same weight, by Megatron-Core's name
    lost: Sequence[str]  # tensors that are not exported with the reference's bits before the step; in fp32
    num_microbatches: int

    @staticmethod
    def read(path: Path) -> LayoutErrors:
        """Read a result from its file."""
        return LayoutErrors(**json.loads(path.read_text(encoding="utf-8")))


def parse(name: str) -> Layout:
    """Parse a name into a layout, without the changes that a model needs. Raises UserError."""
    tokens = TOKEN.findall(name)
    sizes: dict[str, Any] = {kind or sp: int(size) if kind else True for kind, size, sp in tokens}
    if not NAME.fullmatch(name) or len(sizes) < len(tokens):
        raise UserError(
            f"--layouts: {name!r} is not a layout; join tpN, sp, ppN, vppN, cpN, epN, etpN, dpN by + as in tp2+sp, "
            "each once"
        )
    implied = []
    if sizes.get("vpp", 1) > 1 and "pp" not in sizes:
        sizes["pp"] = 2
        implied.append("pp2")
    if sizes.get("etp", 1) > 1 and "tp" not in sizes:
        sizes["tp"] = sizes["etp"]
        implied.append(f"tp{sizes['tp']}")
    if "etp" not in sizes and "ep" not in sizes:
        sizes["etp"] = sizes.get("tp", 1)
    missing = {"tp": sizes.get("sp", False), "pp": sizes.get("vpp", 1) > 1}
    for needed, asked in missing.items():
        if asked and sizes.get(needed, 1) == 1:
            raise UserError(f"--layouts: {name!r} needs {needed} of at least 2; add {needed}2")
    return Layout(name, **sizes, implied=tuple(implied))


def resolve(name: str, hf: HFConfig, *, nproc: int | None = None) -> Layout:
    """Return a name's layout for a model; data parallelism fills `nproc` ranks."""
    layout = parse(name)
    if layout.tp > 1 and not layout.sp and (hf.moe or hf.mla or hf.delta):
        layout = replace(layout, sp=True, implied=(*layout.implied, "sp"))
    if hf.moe is None and layout.ep == 1 and "etp" not in name:
        layout = replace(layout, etp=layout.tp)
    if nproc is not None:
        layout = _filled(layout, nproc)
    if layout.ranks > MAX_RANKS:
        raise UserError(f"--layouts: {name} needs {layout.ranks} ranks; at most {MAX_RANKS} are started on one machine")
    problems = check_layout(hf, layout.parallel_layout())
    if hf.moe is None and "etp" in name:
        problems.append(f"etp={layout.etp}: model_type={hf.family} has no experts")
    if problems:
        raise UserErrors([f"--layouts: {name} is not possible: {problem}" for problem in problems])
    return layout


def fsdp(ranks: int) -> Layout:
    """Return the layout of the FSDP engine over `ranks` ranks."""
    return Layout(f"fsdp{ranks}", dp=ranks, engine="fsdp")


def resolve_all(names: str, hf: HFConfig, *, nproc: int | None = None, runs: bool = False) -> list[Layout]:
    """Return the layouts of a list "tp2,pp2", of runs also "1,fsdp2". Raises UserErrors."""

    def make(name: str) -> Layout:
        engine = FSDP.fullmatch(name) if runs else None
        if engine is not None:
            return fsdp(int(engine[1]))
        return REFERENCE if runs and name == "1" else resolve(name, hf, nproc=nproc)

    return _each(names, make)


def usual(hf: HFConfig) -> str:
    """Return the default list: `ALL`, without layouts of experts for a dense model."""
    return ",".join(name for name in ALL.split(",") if hf.moe is not None or "ep" not in name)


def stages(layouts: str | Sequence[Layout]) -> int:
    """Return the smallest number of layers that all pipelines split evenly."""
    every = _each(layouts, parse) if isinstance(layouts, str) else layouts
    return math.lcm(*(layout.pp * layout.vpp for layout in every))


def _each(names: str, make: Callable[[str], Layout]) -> list[Layout]:
    """Apply `make` to every name of a list. Raises UserErrors with all mistakes."""
    unique = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    if not unique:
        raise UserError(f"--layouts is empty: name at least one, as {ALL}")
    layouts, problems = [], []
    for name in unique:
        try:
            layouts.append(make(name))
        except UserError as error:
            problems += str(error).splitlines()
    if problems:
        raise UserErrors(problems)
    return layouts


def _filled(layout: Layout, nproc: int) -> Layout:
    """Return the layout with data parallelism filling `nproc` ranks. Raises UserError."""
    if nproc % layout.ranks:
        raise UserError(
            f"--nproc={nproc} is not a multiple of the {layout.ranks} ranks of {layout.name}; "
            f"leave the layout or --nproc out, or give a multiple of {layout.ranks}"
        )
    dp = nproc // (layout.tp * layout.pp * layout.cp)
    implied = (f"dp{dp}",) if dp > layout.ranks // (layout.tp * layout.pp * layout.cp) else ()
    return replace(layout, dp=dp, implied=(*layout.implied, *implied))


# The largest errors of a layout that pass: bits, tensors that float32 does not export as they are; logprob in nats, of
# any token; loss and grad_norm relative; gradient of any tensor in the Frobenius norm, relative to one rank; weight of
# any tensor after a step, relative to that step.
# In float32, sums in another order differ by 1e-6 to 1e-5 of their size; a wrong layout is off by 1e-2 in some tensor.
FP32: Mapping[str, float] = {
    "bits": 0.0, "logprob": 1e-4, "loss": 1e-5, "grad_norm": 1e-5, "gradient": 1e-4, "weight": 1e-4,
}  # fmt: skip
# bf16 keeps 8 bits: activations differ by some 2^-8 of their size at every layer, gradients by a few hundredths.
BF16: Mapping[str, float] = {**FP32, "logprob": 0.15, "loss": 0.05, "grad_norm": 0.05, "gradient": 0.2, "weight": 0.2}
# If two experts are close, rounding sends a token to another one, which moves both experts' gradients.
BF16_EXPERTS: Mapping[str, float] = {**BF16, "logprob": 0.6, "gradient": 0.75, "weight": 0.75}

# Phases of an update of `mega-rl verify rl`.
UPDATES = "updates"
REWARDS = "rewards"
SAMPLING = "sampling"
SAMPLES = "samples"
LOGPROBS = "log-probs"
EXACT = (UPDATES, REWARDS, SAMPLING)  # phases whose tolerance cannot be changed
# Float32 sums of some hundred terms in another order; a fault anywhere is off by 1e-3 and more. By phase, each of which
# follows from those before it.
TOLERANCES: Mapping[str, float] = {
    UPDATES: 0.0,  # both trainers made the same updates
    REWARDS: 0.0,  # every sample, as float32: one function of the same text, rounded once
    SAMPLING: 0.0,  # dynamic sampling or steps ahead: groups that should not train
    LOGPROBS: 1e-4,  # nats, for a critic values; the largest of any token
    SAMPLES: 4.5,  # deviations of the largest of four sums, which one right run in 37,000 exceeds
    "advantages": 1e-4,  # also returns; the largest of any token
    "loss": 1e-5,  # relative to the sum of the tokens' |losses|, which may cancel
    "gradient norm": 1e-5,  # relative
    "gradient": 1e-5,  # relative, the largest of any tensor in the Frobenius norm
    "weights": 1e-4,  # distance, relative to the distance travelled since the start
}


def tolerances(dtype: str, given: str, *, experts: bool = False) -> dict[str, float]:
    """Return a layout's tolerances in a dtype, changed by `given`, as "logprob=1e-3,loss=1e-3". Raises UserError."""
    return read_changes(given, FP32 if dtype == "fp32" else BF16_EXPERTS if experts else BF16, kind="name")


def read_changes(given: str, usual: Mapping[str, float], *, kind: str = "phase") -> dict[str, float]:
    """Return the tolerances, changed by `given`, as "gradient=1e-4"; kind: the word for a name. Raises UserError."""
    names, allowed = [name for name in usual if name not in EXACT], dict(usual)
    for entry in filter(None, (part.strip() for part in given.split(","))):
        name, _, text = entry.partition("=")
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if name not in names or not 0 <= value < float("inf"):
            raise UserError(
                f"--tolerance={entry}: must be {kind.upper()}=NUMBER with a {kind} of {', '.join(names)} and a number "
                "of at least 0"
            )
        allowed[name] = value
    return allowed


def finite(error: float) -> float:
    """Return the error, infinite if it is not a number, so that it exceeds any tolerance."""
    return error if math.isfinite(error) else math.inf
