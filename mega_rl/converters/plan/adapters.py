"""Low-rank adapters as rules, derived from those of the weights.

What a family's table says of a weight W says where the rows of B and the columns of A go. An adapter of a linear layer
has one A for each module on disk that makes its weight, and one B for each of the rule's sources. A fused weight,
such as q, k and v, so has the adapters of three modules, of which some may be missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mega_rl.config.schema import AdapterConfig
from mega_rl.converters.architecture import Adapter, HFConfig
from mega_rl.converters.families.rules import Primitive, Rule, Source
from mega_rl.errors import UserError
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.untrusted import is_count, is_number, parse_object

PART = ".adapter."  # between a layer and a part of its adapter
A, B, WEIGHT = ".lora_A.weight", ".lora_B.weight", ".weight"  # ends of names on disk, PEFT's
CONFIG_FILE = "adapter_config.json"
# Keys of PEFT's config that make another adapter unless they are so or empty.
_PLAIN = {"peft_type": "LORA", "bias": "none"} | dict.fromkeys(
    ("use_dora", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "modules_to_save", "lora_bias", "target_parameters")
)


def adapter_config(adapter: Adapter, base: str) -> dict[str, Any]:
    """Return the adapter_config.json of a PEFT folder; base: name or folder of the model below."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "use_rslora": adapter.rank_stabilised,
        "target_modules": sorted(set(adapter.targets)),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Return the settings of a PEFT folder's adapter. Raises UserError: it is none that we compute."""
    path = folder / CONFIG_FILE
    try:
        raw = parse_object(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); name a folder that PEFT has saved") from error
    rank, alpha, targets = (raw.get(key) for key in ("r", "lora_alpha", "target_modules"))
    faults = [f"{key}={raw[key]!r}" for key, plain in _PLAIN.items() if raw.get(key) and raw[key] != plain]
    faults += [] if is_count(rank, 1) else [f"r={rank!r}"]
    faults += [] if is_number(alpha) and alpha > 0 else [f"lora_alpha={alpha!r}"]
    is_list = isinstance(targets, list) and targets and all(isinstance(name, str) for name in targets)
    faults += [] if is_list else [f"target_modules={targets!r}"]
    if faults:
        raise UserError(f"{path}: {', '.join(faults)}: legal: LoRA of one rank on linear layers, their names in a list")
    names = sorted({name.rpartition(".")[2] for name in targets or []})
    return AdapterConfig(rank or 0, float(alpha or 0), names, bool(raw.get("use_rslora")))


def with_adapters(rules: Sequence[Rule], adapter: Adapter | None) -> list[Rule]:
    """Return the rules, before each that of its adapter. Raises UserError: a target cannot have one."""
    if adapter is None:
        return list(rules)
    targets = {_target(source) for rule in rules for source in rule.sources if _is_linear(rule)}
    if unknown := [target for target in adapter.targets if target not in targets]:
        raise UserError(
            f"model.adapter.targets: the model has no linear layer {', '.join(unknown)}; legal: "
            f"{', '.join(sorted(targets))}"
        )
    result = []
    for rule in rules:
        # A value head trains as it is.
        result += [*_rules_of_adapter(rule, adapter), replace(rule, frozen=not rule.optional)]
    return result


def uncut(rules: Iterable[Rule], hf: HFConfig, layout: ParallelLayout) -> Iterator[str]:
    """Yield why adapters do not follow a layout."""
    assert hf.adapter is not None
    for rule in rules:
        names = ", ".join(dict.fromkeys(_target(source) for source in targeted(rule, hf.adapter)))
        if names and rule.primitive == "qkv" and hf.num_kv_heads % layout.tp:
            yield f"tp={layout.tp} does not divide num_key_value_heads={hf.num_kv_heads}, as adapters of {names} need"
        if names and rule.per_expert and layout.etp > 1:
            yield f"etp={layout.etp}: adapters of experts ({names}) are not cut; set engine.megatron.etp=1"


def _is_linear(rule: Rule) -> bool:
    """Return whether a rule is a linear layer's weight, of tensors that adapters can follow."""
    several = len({source.name for source in rule.sources}) > 1
    whole = not any(
        source.stacked or source.transposed or (source.share and (several or source.share.groups != "one"))
        for source in rule.sources
    )
    named = rule.param.endswith(WEIGHT) and ".router." not in rule.param and rule.primitive != "vocab"
    return whole and named and not rule.optional and any(_is_matrix(source) for source in rule.sources)


def _is_matrix(source: Source) -> bool:
    return len(source.shape) == 2 and source.name.endswith(WEIGHT)


def _target(source: Source) -> str:
    return source.name.removesuffix(WEIGHT).rpartition(".")[2]


def targeted(rule: Rule, adapter: Adapter) -> list[Source]:
    """Return a rule's sources that get an adapter."""
    return [source for source in rule.sources if _is_matrix(source) and _target(source) in adapter.targets]


def _rules_of_adapter(rule: Rule, adapter: Adapter) -> Iterator[Rule]:
    sources = targeted(rule, adapter)
    if sources and not _is_linear(rule):
        raise UserError(
            f"model.adapter.targets: {sources[0].name} is not the weight of one linear layer, or holds several "
            f"in turns; leave {_target(sources[0])} out"
        )
    is_row, module = rule.primitive == "row", rule.param.removesuffix(WEIGHT)
    for number, name in enumerate(dict.fromkeys(source.name for source in sources)):
        columns = next(source.shape[1] for source in sources if source.name == name)
        of_a = Source(name.removesuffix(WEIGHT) + A, ("rank", columns))
        yield _derived(rule, f"{module}{PART}a.{number}", "row" if is_row else "copy", of_a)
    for source in sources:
        of_b = replace(source, name=source.name.removesuffix(WEIGHT) + B, shape=(source.shape[0], "rank"))
        cut: Primitive = "copy" if is_row or rule.primitive == "copy" else "col"
        yield _derived(rule, f"{module}{PART}b.{rule.sources.index(source)}", cut, of_b)


def _derived(rule: Rule, param: str, primitive: Primitive, source: Source) -> Rule:
    """Return the rule of a part of an adapter.

    A checkpoint without the part leaves it as it begins. One tensor on disk may make several parts, so all of a layer
    are exported together.
    """
    te = rule.te and param.replace(rule.param.removesuffix(WEIGHT), rule.te.removesuffix(WEIGHT))
    return replace(
        rule, param=param, te=te, primitive=primitive, sources=(source,), optional=True, together=f"{rule.param}{PART}"
    )
