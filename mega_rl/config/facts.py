"""Facts of a checkpoint that the rules read, and the words that rules share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MAX_LISTED = 12  # legal values that one line repeats
MAX_CANDIDATE = 4096  # largest divisor that is looked for


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a checkpoint's model that a layout must divide, and what else sets limits."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    multi_latent_attention: bool = False
    num_experts: int = 0  # of a mixture-of-experts layer; 0: there is none
    expert_ffn_hidden_size: int = 0
    expert_biases: bool = False

    def too_long(self, key: str, keys: str, longest: int, *, sglang: bool) -> Iterator[str]:
        """Yield that the checkpoint of `key` has no room for `longest` tokens, the sum of the settings `keys`."""
        free = " but the one that SGLang keeps free" * sglang
        if longest > (positions := self.max_position_embeddings - sglang):
            yield f"{keys}={longest} is above the {positions} positions of {key}{free}; make them shorter"


def divisors(number: int) -> list[int]:
    """Divisors up to MAX_CANDIDATE, and the number itself."""
    small = [candidate for candidate in range(1, min(number, MAX_CANDIDATE + 1)) if number % candidate == 0]
    return [*small, number] if small[-1:] != [number] else small


def listed(values: Sequence[int]) -> str:
    """The first values, as a line of text."""
    words = [str(value) for value in values[:MAX_LISTED]]
    return ", ".join(words) + (", ..." if len(values) > MAX_LISTED else "")


def leave_out(*keys: str) -> str:
    """Return the advice to drop settings, from a recipe or on a command line."""
    them = "it" if len(keys) == 1 else "them"
    return f"leave {them} out (on a command line: {' '.join(f'{key}=null' for key in keys)})"
