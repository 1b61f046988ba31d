"""OLMo 2 and 3, EXAONE 4: norms on the outputs of attention and MLP, not their inputs."""

from __future__ import annotations

from dataclasses import replace

from mega_rl.converters.families import windows
from mega_rl.converters.families.base import NO_LINEAR_BIAS, Family, KnownBug
from mega_rl.converters.families.dense import ATTENTION_WEIGHTS, EMBEDDING, MLP_WEIGHTS, OUTPUT
from mega_rl.converters.families.fields import Fields
from mega_rl.converters.families.moe import JOINT_NORM
from mega_rl.converters.families.rules import copy, in_layers

LAYERS = in_layers(
    *ATTENTION_WEIGHTS,
    copy("post_self_attn_layernorm.weight", "post_attention_layernorm.weight", "hidden"),
    *MLP_WEIGHTS,
    copy("post_mlp_layernorm.weight", "post_feedforward_layernorm.weight", "hidden"),
)
OLMO = EMBEDDING + in_layers(*JOINT_NORM) + LAYERS + OUTPUT


def outside_windows(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Return the layers of EXAONE 4 without rotation: those without a window, if others have one."""
    if fields.get("sliding_window") is None:
        return ()
    window = windows.but_every_nth(fields, num_layers)
    return tuple(not inside for inside in (window.layers if window else [False] * num_layers))


OLMO2 = Family(
    "olmo2",
    OLMO,
    title="OLMo 2",
    differs="norms on the outputs of attention and MLP instead of their inputs; one norm over all heads of q, and of k",
    defaults={"rms_norm_eps": 1e-5},
    fixed={"attention_bias": NO_LINEAR_BIAS},
    qk_norm_joint=True,
    pre_norms=False,
    post_norms=True,
)
OLMO3 = replace(
    OLMO2,
    model_type="olmo3",
    title="OLMo 3",
    differs="as OLMo 2; windows in three of four layers, which rotate without the scaling of long contexts",
    known_bugs=(
        KnownBug(
            "5.13.0",
            lambda hf: hf.rope.local_theta is not None and hf.window is not None,
            "transformers from 5.0 on scales the rotation of olmo3's sliding-window layers too "
            "(found by huggingface/transformers#45945)",
        ),
    ),
    defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "layer_types": None},
    rope_per_layer_type=True,
    window=lambda fields, num_layers: windows.by_layer_types(fields, [(i + 1) % 4 != 0 for i in range(num_layers)]),
)
EXAONE4 = Family(
    "exaone4",
    EMBEDDING + LAYERS + OUTPUT,
    title="EXAONE 4",
    differs=(
        "norms on the outputs of attention and MLP instead of their inputs; norms of each head of q and k; windows in "
        "three of four layers, the others without rotation"
    ),
    defaults={
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "layer_types": None,
    },
    qk_norm=True,
    pre_norms=False,
    post_norms=True,
    window=windows.but_every_nth,
    unrotated=outside_windows,
)
