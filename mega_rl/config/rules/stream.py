"""Rules of training prompts that are streamed: what needs all of them, or their number, cannot go with it."""

from __future__ import annotations

from collections.abc import Iterator

from mega_rl.config.schema import Config, StreamConfig


def stream(config: Config) -> Iterator[str]:
    """Yield the problems of a stream."""
    data, own = config.data, config.data.stream
    if not own.rows:
        if own.timeout_s != StreamConfig().timeout_s:
            yield f"data.stream.timeout_s={own.timeout_s:g} has no effect: it needs data.stream.rows above 0"
        return
    chosen = f"data.stream.rows={own.rows}"
    if data.source.name != "files":
        yield f"{chosen} has no effect: data.source={data.source} yields the rows; leave one of the two out"
        return
    if config.trainer.epochs:
        yield (
            f"{chosen} with trainer.epochs={config.trainer.epochs:g}: a stream's number of prompts is not known; set "
            "trainer.steps"
        )
    if data.val_size:
        yield (
            f"{chosen} with data.val_size={data.val_size}: rows cannot be split off a stream; name held-out prompts in "
            "data.val_files"
        )
    if data.curriculum.name == "column":
        yield f"{chosen} with data.curriculum=column: a stream cannot be sorted; leave one out"
    if data.curriculum.name == "success":
        yield (
            f"{chosen} with data.curriculum=success: prompts of a stream come once an epoch; set "
            "rollout.dynamic_sampling.max_generations to drop groups of equal rewards"
        )
    if config.reward.sources and not data.mixture.sources:
        yield (
            f"{chosen} with reward.sources: which sources the rows of a stream have is not known before they are read; "
            "make each one a source of data.mixture.sources"
        )
    if data.mixture.sources and not any(source.weight for source in data.mixture.named().values()):
        yield (
            f"{chosen} with data.mixture.sources without weights: the number of a stream's prompts, which shares would "
            "follow, is not known; give every source a weight"
        )
