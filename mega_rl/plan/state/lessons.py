"""Memory of distillation over the whole vocabulary: hidden states on the host, and copies of the projection."""

from __future__ import annotations

from dataclasses import dataclass

from mega_rl.config.plugins.choices import LOSS
from mega_rl.converters.plan.sharding import padded_vocab_size
from mega_rl.plan.passes import rows_of_a_minibatch
from mega_rl.plan.setup import PlannedModel, RunSetup


@dataclass(frozen=True)
class LessonBytes:
    """Bytes of the teacher's projection on one rank, beside the teacher's parameters."""

    projection: int = 0  # on the device, while the student trains
    kept: int = 0  # on the host, for the whole run


def teaches(setup: RunSetup) -> bool:
    """Return whether a run learns from a teacher's distributions over the whole vocabulary."""
    return LOSS.needs(setup.config, "needs_teacher")


def hidden_bytes(setup: RunSetup, model: PlannedModel) -> int:
    """Return the bytes of a teacher's hidden states that a rank of the last stage has of a mini-batch."""
    tokens = -(-rows_of_a_minibatch(setup) * setup.longest // setup.layout.cp)
    return tokens * model.hf.hidden_size * setup.itemsize


def lesson_bytes(setup: RunSetup, pp_rank: int) -> LessonBytes:
    """Return the copies of the teacher's projection that a pipeline rank of the student has.

    Student and teacher on one layout read the teacher's parameter, unless the student's turn empties it or FSDP has
    cut it. A teacher on a layout of its own leaves rows for the student's vocabulary on the host.
    """
    if not teaches(setup) or pp_rank < setup.layout.pp - 1:
        return LessonBytes()
    teacher = setup.models["reference"]
    tp = setup.layout.tp
    nbytes = padded_vocab_size(teacher.hf.vocab_size, tp) // tp * teacher.hf.hidden_size * setup.itemsize
    own = setup.for_model(teacher) is not setup
    copied = own or setup.takes_turns or setup.spec == "hf"
    return LessonBytes(nbytes if copied else 0, nbytes if own else 0)
