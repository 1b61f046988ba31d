"""Layers with a sliding window, as each family's Hugging Face code chooses them; None without any."""

from __future__ import annotations

from collections.abc import Callable

from mega_rl.converters.architecture import Window
from mega_rl.converters.families.fields import Fields

LAYER_TYPES = ("full_attention", "sliding_attention")


def in_all_layers(fields: Fields, num_layers: int) -> Window | None:
    """Return the window of Mistral and Mixtral: every layer, unless `sliding_window` is null."""
    return _window(fields, [True] * num_layers)


def if_enabled(fields: Fields, num_layers: int) -> Window | None:
    """Return the window of Qwen3-MoE: every layer once `use_sliding_window` is set."""
    return _window(fields, [True] * num_layers) if fields.boolean("use_sliding_window") else None


def in_last_layers(fields: Fields, num_layers: int) -> Window | None:
    """Return the window of Qwen2 and Qwen3: layers from `max_window_layers` on, or those that `layer_types` says."""
    return _if_used(fields, num_layers, lambda layer, first: layer >= first)


def from_a_layer_on(fields: Fields, num_layers: int) -> Window | None:
    """Return the window of dots.llm1: layers from `max_window_layers` on, or those that `layer_types` says."""
    first = fields.size("max_window_layers", least=0)
    return by_layer_types(fields, [layer >= first for layer in range(num_layers)])


def in_even_first_layers(fields: Fields, num_layers: int) -> Window | None:
    """Return the window of Qwen2-MoE: every second of the first `max_window_layers`, or as `layer_types` says."""
    return _if_used(fields, num_layers, lambda layer, last: layer % 2 == 0 and layer < last)


def _if_used(fields: Fields, num_layers: int, has_window: Callable[[int, int], bool]) -> Window | None:
    """Return the window of Qwen's switch; has_window: of a layer and `max_window_layers`."""
    if not fields.boolean("use_sliding_window"):
        return by_layer_types(fields, [False] * num_layers, off="use_sliding_window=false")
    bound = fields.size("max_window_layers", least=0)
    return by_layer_types(fields, [has_window(layer, bound) for layer in range(num_layers)])


def but_every_nth(fields: Fields, num_layers: int) -> Window | None:
    """Return the window of all layers but every n-th, or as `layer_types` says.

    n is `sliding_window_pattern`.
    """
    if fields.get("layer_types") is not None:
        return by_layer_types(fields, [True] * num_layers)
    pattern = fields.size("sliding_window_pattern")
    return by_layer_types(fields, [(i + 1) % pattern != 0 for i in range(num_layers)])


def by_layer_types(fields: Fields, default: list[bool], *, off: str = "") -> Window | None:
    """Return the window of the layers that `layer_types` names, else `default`. off: setting that disables them."""
    kinds = fields.strings("layer_types", length=len(default), allowed=LAYER_TYPES)
    off = off or ("sliding_window=null" if fields.get("sliding_window") is None else "")
    if off and kinds and "sliding_attention" in kinds:
        fields.refuse("layer_types", f"{off} takes away the windows of sliding_attention; correct one of the two")
        return None
    return _window(fields, default if kinds is None else [kind == "sliding_attention" for kind in kinds])


def _window(fields: Fields, layers: list[bool]) -> Window | None:
    if fields.get("sliding_window") is None or not any(layers):
        return None
    return Window(fields.size("sliding_window"), tuple(layers))
