"""Architectures that a version of transformers computes wrongly, so that parity with it proves nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mega_rl.converters.architecture import HFConfig


@dataclass(frozen=True)
class KnownBug:
    """A fault of the reference: whom it concerns, what it is, where it is fixed."""

    seen_in: str  # version of transformers
    concerns: Callable[[HFConfig], bool]
    what: str


def _yarn_with_mscale(hf: HFConfig) -> bool:
    yarn = hf.rope.yarn
    return hf.family == "deepseek_v2" and yarn is not None and bool(yarn.mscale_all_dim)


KNOWN_BUGS = (
    KnownBug(
        "5.12.1",
        _yarn_with_mscale,
        "transformers leaves yarn's factor mscale^2 out of the softmax scale of deepseek_v2 "
        "(fixed by huggingface/transformers#47435)",
    ),
)


def known_bug(hf: HFConfig) -> KnownBug | None:
    """Why transformers' logits of this architecture are wrong; None where they are right as far as we know."""
    return next((bug for bug in KNOWN_BUGS if bug.concerns(hf)), None)
