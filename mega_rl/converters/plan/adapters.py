"""Low-rank adapters as rules: what a family's table says of a weight W says where the rows of B and columns of A go.

An adapter of a linear layer has one A for each module on disk that makes its weight, and one B for each of the rule's
sources. A fused weight, such as q, k and v, so has the adapters of three modules, of which some may be missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from mega_rl.config.schema import AdapterConfig
from mega_rl.converters.architecture import Adapter, HFConfig
from mega_rl.converters.families.rules import Primitive, Rule, Source
from mega_rl.errors import UserError

PART = ".adapter."  # between a layer and a part of its adapter
A, B, WEIGHT = ".lora_A.weight", ".lora_B.weight", ".weight"  # ends of names on disk, PEFT's


def adapted(hf: HFConfig, settings: AdapterConfig) -> HFConfig:
    """Return a model with the adapters of `model.adapter`; rank 0: as it is."""
    made = Adapter(settings.rank, settings.alpha, tuple(settings.targets), settings.rs) if settings.rank else None
    return replace(hf, adapter=made)


def with_adapters(rules: Iterable[Rule], adapter: Adapter | None) -> Iterator[Rule]:
    """Yield the rules, before each that of its adapter. Raises UserError: a target cannot have one."""
    for rule in rules:
        if adapter is not None:
            yield from _rules_of_adapter(rule, adapter)
            rule = replace(rule, frozen=not rule.optional)  # a value head trains
        yield rule


def targeted(rule: Rule, adapter: Adapter) -> list[Source]:
    """Return a rule's sources that get an adapter."""
    return [
        source
        for source in rule.sources
        if len(source.shape) == 2
        and source.name.endswith(WEIGHT)
        and source.name.removesuffix(WEIGHT).rpartition(".")[2] in adapter.targets
    ]


def _rules_of_adapter(rule: Rule, adapter: Adapter) -> Iterator[Rule]:
    sources = targeted(rule, adapter)
    if any(source.stacked or source.transposed or source.share for source in sources):
        raise UserError(
            f"model.adapter.targets: {sources[0].name} holds several layers' weights in turns, which adapters do not "
            f"cut; leave {sources[0].name.removesuffix(WEIGHT).rpartition('.')[2]} out"
        )
    is_row, module = rule.primitive == "row", rule.param.removesuffix(WEIGHT)
    for number, name in enumerate(dict.fromkeys(source.name for source in sources)):
        columns = next(source.shape[1] for source in sources if source.name == name)
        of_a = Source(name.removesuffix(WEIGHT) + A, ("rank", columns))
        yield _derived(rule, f"{module}{PART}a.{number}", "row" if is_row else "copy", of_a)
    for source in sources:
        of_b = Source(source.name.removesuffix(WEIGHT) + B, (source.shape[0], "rank"), part=source.part)
        cut: Primitive = "copy" if is_row or rule.primitive == "copy" else "col"
        yield _derived(rule, f"{module}{PART}b.{rule.sources.index(source)}", cut, of_b)


def _derived(rule: Rule, param: str, primitive: Primitive, source: Source) -> Rule:
    """Return the rule of a part of an adapter; a checkpoint without it leaves the part as it begins.

    One tensor on disk may make several parts, so all of a layer are exported together.
    """
    te = rule.te and param.replace(rule.param.removesuffix(WEIGHT), rule.te.removesuffix(WEIGHT))
    return replace(
        rule, param=param, te=te, primitive=primitive, sources=(source,), optional=True, together=f"{rule.param}{PART}"
    )
