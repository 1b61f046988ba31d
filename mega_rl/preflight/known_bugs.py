"""Architectures that some releases of transformers compute wrongly, so that parity with them proves nothing."""

from __future__ import annotations

from importlib.metadata import version

from packaging.version import Version

from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.families import FAMILIES, KnownBug


def known_bug(hf: HFConfig, *, transformers: str | None = None) -> KnownBug | None:
    """Return why logits of this architecture are wrong in a release of transformers; None where no fault is known.

    `transformers` defaults to the installed version.
    """
    release = Version(transformers or version("transformers"))
    bugs = FAMILIES[hf.family].known_bugs
    return next((bug for bug in bugs if release < Version(bug.fixed_in) and bug.concerns(hf)), None)
