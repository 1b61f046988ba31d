"""A model and its layout, the start of every plan, and reasons against a layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from mega_rl.converters.architecture import HFConfig
from mega_rl.errors import UserErrors
from mega_rl.parallel.layout import ParallelLayout

Head = Literal["lm", "value"]
# Parameters of the live chunks: those of Megatron-Core's local or Transformer Engine layers, or whole tensors of a
# checkpoint.
Spec = Literal["local", "te", "hf"]

UNEVEN = "engine.megatron.pipeline (--pp-layout on a command line) gives stages of different sizes"


@dataclass(frozen=True)
class Sharding:
    """A model and how it is cut: everything that a plan depends on, except the rank."""

    hf: HFConfig
    layout: ParallelLayout = ParallelLayout()  # noqa: RUF009 - immutable
    spec: Spec = "local"  # the live chunks have its parameter names
    head: Head = "lm"

    @property
    def merged(self) -> Sharding:
        """Return the model whose weights have its adapters in them."""
        return replace(self, hf=replace(self.hf, adapter=None))

    @property
    def vocab(self) -> int:
        """Return the rows of the embedding over all ranks."""
        return padded_vocab_size(self.hf.vocab_size, self.layout.tp)

    def check(self) -> None:
        """Check that the model can be cut this way. Raises UserErrors with every reason why not."""
        problems = check_layout(self.hf, self.layout)
        if problems:
            raise UserErrors(problems)


def padded_vocab_size(vocab: int, tp: int) -> int:
    """Return the smallest multiple of `tp` that holds `vocab` rows."""
    return -(-vocab // tp) * tp


def check_layout(hf: HFConfig, layout: ParallelLayout) -> list[str]:
    """Return a line per reason why a model cannot be cut this way; empty if none."""
    tp = layout.tp
    problems = []
    sizes = {"num_attention_heads": hf.num_heads}
    if hf.moe is None or not all(hf.moe.layers):
        sizes["intermediate_size"] = hf.ffn_hidden_size
    if hf.moe is not None and hf.moe.shared_ffn_hidden_size:
        sizes["the shared experts' intermediate size"] = hf.moe.shared_ffn_hidden_size
    if "mtp" in hf.switches:
        sizes["hidden_size"] = hf.hidden_size  # rows of the projection of multi-token prediction
    problems += [f"tp={tp} does not divide {name}={size}" for name, size in sizes.items() if size % tp]
    if hf.mla is None:
        if hf.num_kv_heads % tp and tp % hf.num_kv_heads:
            problems.append(f"tp={tp} must divide num_key_value_heads={hf.num_kv_heads} or be a multiple of it")
        if hf.qk_norm_joint and hf.num_kv_heads % tp:
            problems.append(f"tp={tp} does not divide num_key_value_heads={hf.num_kv_heads}, normed all together")
        qkv_rows = hf.dims["q_and_gate" if hf.attention_gate else "q"] + 2 * hf.dims["kv"]
        if qkv_rows % tp:
            problems.append(f"tp={tp} does not divide the {qkv_rows} rows of q, k and v")
    if hf.uncut and layout.cp > 1:
        problems.append(f"cp={layout.cp}: context parallelism does not cut {hf.uncut} yet; set it to 1")
    if hf.delta is not None and hf.delta.num_key_heads % (tp * layout.cp):
        product = f"tp*cp={tp}*{layout.cp}={tp * layout.cp}"
        problems.append(f"{product} does not divide linear_num_key_heads={hf.delta.num_key_heads}")
    problems += _check_experts(hf, layout)
    try:
        layout.layers_of(0, hf.num_layers)
    except ValueError:
        if layout.pipeline is None:
            stages = f"pp*vpp={layout.pp}*{layout.vpp}={layout.num_stages}"
            problems.append(f"{stages} does not divide num_hidden_layers={hf.num_layers}; {UNEVEN}")
        else:
            split = f"pipeline {'+'.join(map(str, layout.pipeline))}={sum(layout.pipeline)}"
            problems.append(f"{split} must be num_hidden_layers={hf.num_layers}")
    return problems


def _check_experts(hf: HFConfig, layout: ParallelLayout) -> list[str]:
    if hf.moe is None:
        return [f"ep={layout.ep}: model_type={hf.family} has no experts"] if layout.ep > 1 else []
    problems = []
    if hf.moe.num_experts % layout.ep:
        problems.append(f"ep={layout.ep} does not divide the number of experts {hf.moe.num_experts}")
    if hf.moe.ffn_hidden_size % layout.etp:
        problems.append(f"etp={layout.etp} does not divide the experts' intermediate size {hf.moe.ffn_hidden_size}")
    if layout.etp > 1 and hf.linear_bias:
        problems.append(f"etp={layout.etp}: Megatron-Core does not cut experts that have biases; set etp to 1")
    return problems
