"""Names of layouts, as "tp2+sp": what they stand for, on how many ranks, for which models. Imports no torch.

A name is a list of sizes in any order, joined by +, - or nothing: tpN, ppN, vppN, cpN, epN, etpN, dpN, and sp.
What is not said follows from the rest:

- vppN without ppN stands on two pipeline ranks; its sends overlap with compute, without which two would be wrong.
- etpN without tpN cuts everything else as it cuts the experts: tp = etp.
- With epN experts are whole (etp = 1) unless etpN is given; without it they are cut as the rest is (etp = tp), which
  is also what training does unless it is told otherwise.
- Sequence parallelism is switched on where experts or latent attention need it under tensor parallelism.
- The ranks are tp * pp * cp * dp, and as many more, in data parallelism, as make room for ep * etp in a stage.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.plan.sharding import check_layout
from mega_rl.errors import UserError, UserErrors
from mega_rl.parallel.layout import ParallelLayout

SIZES = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")
TOKEN = re.compile(r"(vpp|etp|tp|pp|cp|ep|dp)([1-9]\d{0,3})|(sp)")
NAME = re.compile(rf"(?:{TOKEN.pattern})(?:[+-]?(?:{TOKEN.pattern}))*")
ALL = "tp2,tp2+sp,pp2,vpp2,cp2,ep2,ep2+etp2,tp2+ep2+sp,tp2+pp2,cp2+tp2,dp2,dp4"
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
    implied: tuple[str, ...] = ()  # what the name does not say, as words of a name

    @property
    def ranks(self) -> int:
        """Return the world size."""
        return self.pp * math.lcm(self.tp * self.cp * self.dp, self.ep * self.etp)

    @property
    def title(self) -> str:
        """The name, with what was switched on in brackets."""
        return self.name + (f" ({'+'.join(self.implied)})" if self.implied else "")

    @property
    def settings(self) -> dict[str, Any]:
        """Fields of `mega_rl.config.schema.ParallelConfig`."""
        return {
            **{name: getattr(self, name) for name in ("tp", "pp", "vpp", "cp", "ep", "etp")},
            "sequence_parallel": self.sp,
            "overlap_p2p": self.vpp > 1,
        }

    def parallel_layout(self) -> ParallelLayout:
        """The arithmetic of its ranks."""
        settings = {name: value for name, value in self.settings.items() if name != "overlap_p2p"}
        return ParallelLayout(world_size=self.ranks, **settings)


def parse(name: str) -> Layout:
    """The layout of a name, as far as it is the same for every model. Raises UserError."""
    if not NAME.fullmatch(name):
        raise UserError(
            f"--layouts: {name!r} is no layout; join tpN, sp, ppN, vppN, cpN, epN, etpN, dpN by + as in tp2+sp"
        )
    found: dict[str, Any] = {}
    for kind, size, sp in TOKEN.findall(name):
        if (kind or sp) in found:
            raise UserError(f"--layouts: {name!r} says {kind or sp} twice; say it once")
        found[kind or sp] = int(size) if kind else True
    implied = []
    if found.get("vpp", 1) > 1 and "pp" not in found:
        found["pp"] = 2
        implied.append("pp2")
    if found.get("etp", 1) > 1 and "tp" not in found:
        found["tp"] = found["etp"]
        implied.append(f"tp{found['tp']}")
    if "etp" not in found and "ep" not in found:
        found["etp"] = found.get("tp", 1)
    if found.get("sp") and found.get("tp", 1) == 1:
        raise UserError(f"--layouts: {name!r} has sp without tensor parallelism; add tp2, or remove sp")
    if found.get("vpp", 1) > 1 and found["pp"] == 1:
        raise UserError(f"--layouts: {name!r} has virtual stages on one pipeline rank; give pp2, or remove vpp")
    return Layout(name, **found, implied=tuple(implied))


def resolve(name: str, hf: HFConfig, *, nproc: int | None = None) -> Layout:
    """The layout of a name for one model, on `nproc` ranks where given, more data parallelism filling them.

    Raises UserErrors naming every reason why the model cannot be cut so.
    """
    layout = parse(name)
    if layout.tp > 1 and not layout.sp and (hf.moe is not None or hf.mla is not None):
        layout = replace(layout, sp=True, implied=(*layout.implied, "sp"))
    if hf.moe is None and layout.ep == 1 and "etp" not in name:
        layout = replace(layout, etp=layout.tp)
    if nproc is not None:
        layout = _filled(layout, nproc)
    if layout.ranks > MAX_RANKS:
        raise UserError(f"--layouts: {name} needs {layout.ranks} ranks; at most {MAX_RANKS} are started on one machine")
    problems = check_layout(hf, layout.parallel_layout())
    if hf.moe is None and "etp" in name:
        problems.append(f"etp={layout.etp}: model_type={hf.model_type} has no experts")
    if problems:
        raise UserErrors([f"--layouts: {name} is not possible: {problem}" for problem in problems])
    return layout


def fsdp(ranks: int) -> Layout:
    """The FSDP engine over so many ranks."""
    return Layout(f"fsdp{ranks}", dp=ranks, engine="fsdp")


def resolve_all(names: str, hf: HFConfig, *, nproc: int | None = None) -> list[Layout]:
    """The layouts of a list "tp2,pp2"; raises UserErrors with the mistakes in all of them."""
    return _each(names, lambda name: resolve(name, hf, nproc=nproc))


def usual(hf: HFConfig) -> str:
    """Return the list that is compared unless another is given: `ALL`, for a dense model without those of experts."""
    return ",".join(name for name in ALL.split(",") if hf.moe is not None or "ep" not in name)


def stages(names: str) -> int:
    """The smallest number of layers that every pipeline of a list splits evenly; raises UserErrors."""
    return math.lcm(*(layout.pp * layout.vpp for layout in _each(names, parse)))


def _each(names: str, make: Callable[[str], Layout]) -> list[Layout]:
    """`make` of every name of a list, or the mistakes in all of them."""
    wanted = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    if not wanted:
        raise UserError(f"--layouts is empty: name at least one, as {ALL}")
    layouts, problems = [], []
    for name in wanted:
        try:
            layouts.append(make(name))
        except UserError as error:
            problems += str(error).splitlines()
    if problems:
        raise UserErrors(problems)
    return layouts


def _filled(layout: Layout, nproc: int) -> Layout:
    """The layout on `nproc` ranks."""
    if nproc % layout.ranks:
        raise UserError(
            f"--nproc={nproc} is not a multiple of the {layout.ranks} ranks of {layout.name}; "
            f"leave the layout or --nproc out, or give a multiple of {layout.ranks}"
        )
    dp = nproc // (layout.tp * layout.pp * layout.cp)
    implied = (f"dp{dp}",) if dp > layout.ranks // (layout.tp * layout.pp * layout.cp) else ()
    return replace(layout, dp=dp, implied=(*layout.implied, *implied))
