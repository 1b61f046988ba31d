"""Rules of a layout of the reference's own: `engine.megatron.reference`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mega_rl.config.choices import has_reference
from mega_rl.config.facts import ModelFacts, leave_out
from mega_rl.config.rules import parallel
from mega_rl.config.schema import Config

_SECTION = "engine.megatron.reference"


def has_own_layout(config: Config) -> bool:
    """Return whether the reference of a run is cut differently from the other models."""
    par = config.engine.megatron
    return config.engine.backend == "megatron" and has_reference(config) and par.of_reference != par


def own_layout(config: Config, world_size: int, models: Mapping[str, ModelFacts]) -> Iterator[str]:
    """Sizes of the reference that do not go together, with the run or with its model; none without its own layout."""
    par = config.engine.megatron
    for name, size in par.reference.sizes.items():
        actors = par.etp or par.tp if name == "etp" else getattr(par, name)
        if size == actors and not (name == "etp" and par.reference.tp):
            setting = f"{_SECTION}.{name}"
            yield f"{setting}={size} has no effect: it is the actor's already; {leave_out(setting)}"
    if not has_own_layout(config):
        return
    own = par.of_reference
    yield from parallel.layout(own, world_size, section=_SECTION)
    interval = config.algorithm.kl.reference_interval
    if interval:
        yield (
            f"algorithm.kl.reference_interval={interval} with {_SECTION}: the reference takes in the policy's weights "
            "rank by rank, which needs equal shards; set it to 0, or leave the reference on the actor's layout"
        )
    batch, longest = config.trainer.microbatch, config.data.max_prompt_tokens + config.rollout.max_new_tokens
    pieces = 2 * own.cp if own.cp > 1 else 1
    rounded = -(-longest // pieces) * pieces
    if batch.packing and own.cp != par.cp and batch.max_tokens < rounded:
        yield (
            f"trainer.microbatch.max_tokens={batch.max_tokens} cannot hold one sequence of data.max_prompt_tokens+"
            f"rollout.max_new_tokens={longest} for the reference, rounded up to a multiple of 2*cp={pieces} "
            f"({_SECTION}.cp); make it at least {rounded}"
        )
    key = "model.ref_path" if config.model.ref_path else "model.path"
    if key in models:
        facts = models[key]
        yield from parallel.fits_model(own, key, facts, section=_SECTION)
        if facts.num_experts and own.moe.dispatcher == "deepep" and own.ep * (own.etp or own.tp) == 1:
            yield (
                f"{_SECTION} with engine.megatron.moe.dispatcher=deepep: with ep*etp=1 every rank has all experts of "
                f"the reference whole, and no token travels; set {_SECTION}.ep above 1 or dispatcher=alltoall"
            )
