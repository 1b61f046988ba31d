"""Corrections by the name that a recipe chooses."""

from __future__ import annotations

from collections.abc import Callable

from mega_rl.algorithms.corrections.base import Correction
from mega_rl.algorithms.corrections.icepop import IcePop
from mega_rl.algorithms.corrections.opsm import OPSM
from mega_rl.algorithms.corrections.rejection import GeometricRejection, SequenceRejection
from mega_rl.algorithms.corrections.tis import TIS

# Called with the settings of the recipe; names and settings as in `mega_rl.config.schema.algorithms.CORRECTIONS`, which
# has "none" besides.
CORRECTIONS: dict[str, Callable[..., Correction]] = {
    "tis": TIS,
    "icepop": IcePop,
    "geometric_rejection": GeometricRejection,
    "sequence_rejection": SequenceRejection,
    "opsm": OPSM,
}
