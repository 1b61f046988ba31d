"""Low-rank adapters to SGLang servers: the base goes once, and later updates send only the adapters."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Mapping, Sequence

from torch import Tensor

from mega_rl.converters.architecture import Adapter, HFConfig
from mega_rl.converters.families import FAMILIES
from mega_rl.converters.plan.adapters import adapter_config
from mega_rl.errors import UserError
from mega_rl.protocols import Ranks
from mega_rl.rollout.sglang.control import ADAPTER, ServerError, each
from mega_rl.rollout.sglang.weights.transport import Server, TrainerWeights

_PROVED = {name for name, family in FAMILIES.items() if family.adapters_in_sglang}
# SGLang fuses these, and fails where one comes without its leader; it fills in zeros for k_proj only.
_LEADERS = {"q_proj": "v_proj", "k_proj": "q_proj", "v_proj": "q_proj", "gate_proj": "up_proj", "up_proj": "gate_proj"}
_TARGETS = frozenset({*_LEADERS, "o_proj", "down_proj"})


def goes_apart(hf: HFConfig, setting: str, *, joined: bool, takes_turns: bool) -> tuple[bool, str]:
    """Return whether servers get adapters next to the base, and else why the weights come merged.

    setting: rollout.sglang.sync.adapter. takes_turns: servers give back their weights' memory between generations.
    Raises UserError where the setting asks for what cannot be.
    """
    if hf.adapter is None:
        return False, ""
    targets = set(hf.adapter.targets)
    alone = sorted(name for name in targets if name in _LEADERS and _LEADERS[name] not in targets)
    reasons = {
        "rollout.sglang.sync.adapter=merged": setting == "merged",
        "servers on the trainer's devices give back their weights, and get all of them anew": takes_turns,
        "joined servers may have no --enable-lora": joined and setting == "auto",
        f"model_type={hf.family}: adapters in SGLang are not proved": hf.family not in _PROVED,
        f"SGLang has no adapters of {', '.join(sorted(targets - _TARGETS))}": bool(targets - _TARGETS),
        f"SGLang has no adapter of {', '.join(alone)} without its neighbour's": bool(alone),
    }
    why = next((reason for reason, holds in reasons.items() if holds), "")
    if why and setting == "adapter":
        raise UserError(f"rollout.sglang.sync.adapter=adapter: {why}; set it to auto or merged")
    return not why, why


def server_arguments(adapter: Adapter | None, device: str) -> dict[str, object]:
    """Return SGLang's arguments for a server that gets adapters."""
    assert adapter is not None
    targets = list(adapter.targets)
    # Health checks generate without the adapters, so batches mix two.
    args = {"enable_lora": True, "max_lora_rank": adapter.rank, "lora_target_modules": targets}
    return args | {"max_loras_per_batch": 2} | ({"lora_backend": "torch_native"} if device == "cpu" else {})


class AdapterPush:
    """Sends the trainer's adapters to servers, under one name; rank 0 talks to all."""

    def __init__(self, weights: TrainerWeights, servers: Mapping[int, Server], ranks: Ranks) -> None:
        """servers: of this moment, by index."""
        self._weights, self._servers, self._ranks = weights, servers, ranks

    def send(self, *, version: int, servers: Sequence[int]) -> tuple[dict[int, str], dict[str, Tensor]]:
        """Replace the adapters of servers that are paused, and raise their weight version; collective.

        Returns the failures that this rank saw, and what was sent, on the ranks that have it.
        """
        tensors = self._weights.adapters()
        if self._ranks.rank:
            return {}, tensors
        content = base64.b64encode(pickle.dumps(tensors, protocol=4)).decode("ascii")
        _, failed = each(servers, lambda i: self._replace(self._servers[i], content, version))
        return failed, tensors

    def _replace(self, server: Server, content: str, version: int) -> None:
        """Replace a server's adapters.

        The name stays: a request that was held back while generation paused looks it up afterwards.
        """
        control, adapter = server.receiver, self._weights.engine.sharding.hf.adapter
        assert adapter is not None
        try:
            control.succeed("/unload_lora_adapter", {"lora_name": ADAPTER})
        except ServerError as error:
            if error.status != 400:  # 400: it has none
                raise
        # SGLang computes alpha / rank, also of rank-stabilised adapters.
        config = adapter_config(adapter, "") | {"lora_alpha": adapter.scale * adapter.rank, "use_rslora": False}
        body = {"lora_name": ADAPTER, "config_dict": config, "serialized_named_tensors": [content] * server.tp}
        control.succeed("/load_lora_adapter_from_tensors", body)
        control.succeed("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
