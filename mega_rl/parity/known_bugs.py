"""Where transformers itself computes something else than the model's authors: parity against it says nothing there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mega_rl.converters.architecture import HFConfig


@dataclass(frozen=True)
class KnownBug:
    """A fault of a reference implementation, found by comparing and traced to its cause."""

    family: str
    seen_in: str  # version of transformers
    fixed_by: str
    symptom: str
    holds: Callable[[HFConfig], bool]


def _yarn_with_mscale(hf: HFConfig) -> bool:
    return hf.rope.kind == "yarn" and hf.rope.yarn is not None and bool(hf.rope.yarn.mscale_all_dim)


KNOWN_BUGS = (
    KnownBug(
        family="deepseek_v2",
        seen_in="5.12.1",
        fixed_by="huggingface/transformers#47435",
        symptom="attention logits lack the factor mscale^2 of YaRN; logits are off by several units",
        holds=_yarn_with_mscale,
    ),
)


def known_bug(hf: HFConfig) -> KnownBug | None:
    """The fault that spoils a comparison of this model's logits, if one is known."""
    return next((bug for bug in KNOWN_BUGS if bug.family == hf.family and bug.holds(hf)), None)
