"""What a model family states: its table of rules and what its Hugging Face code hard-wires."""

from __future__ import annotations

from dataclasses import dataclass

from mega_rl.converters.rules import Rule


@dataclass(frozen=True)
class Family:
    """A model family: its table and what its Hugging Face code hard-wires instead of reading from config.json."""

    model_type: str
    rules: tuple[Rule, ...]
    qkv_bias: bool = False  # q, k and v have a bias whatever config.json says
    qk_norm: bool = False  # RMSNorm over each head of q and k
    bias_fields: tuple[str, ...] = ()  # config.json booleans that its code reads, default False
    head_dim: int | None = None  # where config.json has none; None: hidden_size // num_attention_heads
    sliding_window: bool = False  # its code can use a sliding window
    ignored: tuple[str, ...] = ("model.layers.{layer}.self_attn.rotary_emb.inv_freq",)
    # Tensors that checkpoints repeat inside multi-token prediction layers.
    mtp_ignored: tuple[str, ...] = ()
