"""Architectures that some releases of transformers compute wrongly, so that parity with them proves nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

from packaging.version import Version

from mega_rl.converters.architecture import HFConfig


@dataclass(frozen=True)
class KnownBug:
    """A fault of the reference: whom it concerns, what it is, where it is fixed."""

    fixed_in: str  # the first release of transformers without it
    concerns: Callable[[HFConfig], bool]
    what: str


def _yarn_with_mscale(hf: HFConfig) -> bool:
    yarn = hf.rope.yarn
    return hf.family == "deepseek_v2" and yarn is not None and bool(yarn.mscale_all_dim)


KNOWN_BUGS = (
    KnownBug(
        "5.15.0",
        _yarn_with_mscale,
        "transformers before 5.15 leaves yarn's factor mscale^2 out of the softmax scale of deepseek_v2 "
        "(fixed by huggingface/transformers#47435)",
    ),
)


def known_bug(hf: HFConfig, *, transformers: str | None = None) -> KnownBug | None:
    """Return why logits of this architecture are wrong in a release of transformers; None where no fault is known.

    `transformers` defaults to the installed version.
    """
    release = Version(transformers or version("transformers"))
    return next((bug for bug in KNOWN_BUGS if release < Version(bug.fixed_in) and bug.concerns(hf)), None)
