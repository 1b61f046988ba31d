"""Probe of the attention kernels that torch runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

SOFTMAX = (torch.softmax, torch.Tensor.softmax, F.softmax)


class AttentionProbe(TorchFunctionMode):
    """Counts in `ran` what attention computes with inside the context: "sdpa" or "eager".

    "eager" is a softmax over scores [.., heads, queries, keys], which neither routers nor output layers have. A
    recomputed forward counts again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the call and let it happen; what it calls inside is not seen."""
        if func is F.scaled_dot_product_attention:
            self.ran["sdpa"] += 1
        elif func in SOFTMAX and args[0].dim() >= 4:
            self.ran["eager"] += 1
        return func(*args, **(kwargs or {}))
