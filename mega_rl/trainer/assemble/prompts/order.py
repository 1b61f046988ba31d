"""The order in which a run draws its training prompts, and what it draws of each source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mega_rl.config.schema import ColumnCurriculum, Config, SuccessCurriculum
from mega_rl.data.sampling.epochs import Growth, StepOrder
from mega_rl.data.sampling.mixture import OrderPlan, mixture_of, weights_by_size
from mega_rl.data.sampling.success import Preference, SuccessRates
from mega_rl.errors import UserError
from mega_rl.trainer.assemble.prompts.stream import TrainStreams
from mega_rl.types import Metrics, Prompt


class PromptOrder(NamedTuple):
    """Order of the training prompts, with the success rates that it follows."""

    steps: StepOrder
    rates: SuccessRates | None  # None: it does not depend on the run's samples

    def metrics(self, drawn: int) -> Metrics:
        """Return the metrics of a step after which so many prompts are drawn; called once a step."""
        return self.steps.metrics(drawn) | self.steps.waits()


def prompt_order(config: Config, prompts: Sequence[Prompt], streams: TrainStreams | None = None) -> PromptOrder:
    """Return the order of a run, nothing measured yet. Raises UserError for a source that has no prompts left.

    streams: in the place of prompts that are in memory.
    """
    if streams is not None:
        return PromptOrder(streams.order(config), None)
    rates = success_rates(config, prompts)
    return PromptOrder(prompt_sampler(config, prompts, rates), rates)


def success_rates(config: Config, prompts: Sequence[Prompt]) -> SuccessRates | None:
    """Return the success rates of the training prompts, none measured yet; None of a run that does not go by them."""
    own = config.data.curriculum
    return SuccessRates(prompts, memory=own.memory) if isinstance(own, SuccessCurriculum) else None


def prompt_sampler(config: Config, prompts: Sequence[Prompt], rates: SuccessRates | None = None) -> StepOrder:
    """Return the order in which a run draws its training prompts. Raises UserError for a source that has none left.

    rates: of `success_rates`, which the order follows.
    """
    data, trainer = config.data, config.trainer
    success = data.curriculum if rates is not None else None
    plan = OrderPlan(
        shuffle=data.shuffle,
        seed=trainer.seed,
        growth=_growth(config),
        preference=Preference(success.prefer, success.explore) if isinstance(success, SuccessCurriculum) else None,
    )
    if not data.mixture.sources:
        return plan.order(prompts, rates, batch_size=trainer.prompts_per_step)
    sources = data.mixture.named()
    by_source = {name: [prompt for prompt in prompts if prompt.source == name] for name in sources}
    if empty := [name for name, own in by_source.items() if not own]:
        raise UserError(
            f"data.val_size={data.val_size}: leaves data.mixture.sources.{empty[0]} no prompt to train on; make it "
            "smaller, or name data.val_files"
        )
    weights = {name: source.weight for name, source in sources.items()}
    if not any(weights.values()):
        weights = weights_by_size({name: len(own) for name, own in by_source.items()}, data.mixture.temperature)
    return mixture_of(by_source, weights, plan, batch_size=trainer.prompts_per_step, rates=rates)


def _growth(config: Config) -> Growth | None:
    """Return how a curriculum grows, None without one."""
    own = config.data.curriculum
    if not isinstance(own, ColumnCurriculum):
        return None
    return Growth(own.start, own.steps * config.trainer.prompts_per_step, easy_is_high=own.easy == "high")


def source_lines(prompts: Sequence[Prompt], order: StepOrder, *, steps: int) -> Iterator[str]:
    """Yield a line for each source of a mixture: prompts, tokens, and what a run of so many steps draws of it."""
    counts, drawn = order.metrics(order.drawn_after(steps)), order.drawn_after(steps)
    for name in dict.fromkeys(prompt.source for prompt in prompts):
        if f"data/{name}/prompts" not in counts:  # a source that rewards go by, of one mixture
            continue
        own = [len(prompt.token_ids) for prompt in prompts if prompt.source == name]
        share, epochs = counts[f"data/{name}/prompts"] / drawn, counts[f"data/{name}/epochs"]
        yield (
            f"data source {name}: {len(own):,} prompts of {sum(own):,} tokens, {share:.1%} of all draws, {epochs:.3g} "
            f"epochs in {steps} steps"
        )
