"""Share of a device that a server may fill with weights and KV cache while it takes turns with the trainer.

SGLang's `--mem-fraction-static` is a share of the memory that is free when the server starts; the rest is for its
activations, its CUDA graphs and, here, for the trainer. Both sides are on the device at once when weights are sent and
proved: the server has weights and KV cache, the trainer the policy's parameters and what no offload moves. That residue
is an estimate, and unmeasured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mega_rl.errors import UserError

GIB = 1 << 30
TRAINER_RESIDUE = 3 * GIB  # context, NCCL's buffers, workspaces of libraries, what the allocator cannot return
LEAST_CACHE = GIB  # below it a server takes requests one after the other
_SETTING = "rollout.sglang.server.mem_fraction"
# Tokens of one prefill that SGLang 0.5.20 chooses, by the size of the device (srt/arg_groups/memory_hook.py).
_PREFILL_TOKENS = ((20 * GIB, 2048), (60 * GIB, 4096), (160 * GIB, 8192))
_MOST_PREFILL_TOKENS = 16384


@dataclass(frozen=True)
class DeviceShare:
    """Bytes of one device on which a server and the trainer take turns."""

    total: int  # of the smallest device
    policy: int  # the largest part of the policy on a rank, with `reshard.sending_bytes`
    weights: int  # of one tensor-parallel rank of the server
    tp: int  # tensor-parallel ranks of the server

    @property
    def reserve(self) -> int:
        """Return the bytes for activations and CUDA graphs of the server, by SGLang's own rule."""
        tokens = next((count for size, count in _PREFILL_TOKENS if self.total < size), _MOST_PREFILL_TOKENS)
        needed = GIB // 2 + int(1.5 * tokens * (1 << 20)) + self.tp * GIB // 8 + GIB
        return max(needed, 10 * GIB) if self.total > 60 * GIB else needed

    def fraction(self, setting: float) -> float:
        """Return the fraction for `setting`: itself, or for 0 what the trainer leaves, rounded down to thousandths.

        Raises UserError where weights and a KV cache do not fit, or where a setting leaves the policy no room.
        """
        kept = self.policy + TRAINER_RESIDUE
        if not setting:
            room = self.total - kept - self.reserve
            if room < self.weights + LEAST_CACHE:
                raise UserError(
                    f"{_SETTING}=0: colocated servers do not fit: of a device's {_gib(self.total)}, "
                    f"{_gib(self.policy)} are for the policy's parameters while they are sent, {_gib(TRAINER_RESIDUE)} "
                    f"for what the trainer keeps and {_gib(self.reserve)} for the server's activations, which leaves "
                    f"{_gib(room)}, and the server needs {_gib(self.weights)} for weights and at least "
                    f"{_gib(LEAST_CACHE)} for its KV cache; raise rollout.sglang.server.tp (now {self.tp}), cut the "
                    "policy over more ranks (engine.megatron.tp, pp), or set rollout.sglang.placement=separate"
                )
            return math.floor(1000 * room / self.total) / 1000
        if setting * self.total + kept > self.total:
            highest = math.floor(1000 * (1 - kept / self.total)) / 1000
            raise UserError(
                f"{_SETTING}={setting:g} of {_gib(self.total)} leaves no room on colocated devices for the policy's "
                f"{_gib(self.policy)} and {_gib(TRAINER_RESIDUE)} of the trainer, which are there while weights are "
                f"sent; set at most {max(highest, 0.0):g}, or 0 to have it computed"
            )
        if setting * self.total < self.weights:
            raise UserError(
                f"{_SETTING}={setting:g} of {_gib(self.total)} does not hold the {_gib(self.weights)} of weights of "
                f"one rank of a server with rollout.sglang.server.tp={self.tp}; raise either, or set 0 to have the "
                "fraction computed"
            )
        return setting


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
