"""Warnings about settings that can run together and seldom should: logged when a run starts, nothing is refused."""

from __future__ import annotations

from collections.abc import Iterator

from mega_rl.config.needs import updates_of_a_batch
from mega_rl.config.schema import Config


def advice(config: Config) -> Iterator[str]:
    """Yield a line for each such combination: the settings, what they do to the run, and what to set."""
    algorithm, rollout, updates = config.algorithm, config.rollout, updates_of_a_batch(config)
    if updates > 1 and algorithm.loss.settings.get("dual_clip") == 0:
        yield (
            f"algorithm.loss.dual_clip=0 with {updates} optimizer steps for each batch: where the advantage "
            "is negative the gradient of a token grows with its ratio, up to e^20, and is lost beyond; set "
            "algorithm.loss.dual_clip=3"
        )
    decay = algorithm.advantage.settings if algorithm.advantage.name == "gae" else {}
    gae_lambda, own = float(str(decay.get("gae_lambda", 1))), decay.get("policy_lambda") or decay.get("length_alpha")
    if gae_lambda < 1 and not own and rollout.max_new_tokens * (1 - gae_lambda) > 5:
        yield (
            f"algorithm.advantage.gae_lambda={gae_lambda:g} with rollout.max_new_tokens="
            f"{rollout.max_new_tokens}: the score at the end of a response hardly moves tokens more than "
            f"{5 / (1 - gae_lambda):.0f} before it; set gae_lambda=1 with policy_lambda=0.95 or length_alpha=0.05"
        )
    if config.trainer.steps > 60 and not (config.checkpoint.save_interval or config.checkpoint.memory.interval):
        yield (
            f"checkpoint.save_interval=0 with trainer.steps={config.trainer.steps}: a run that is killed loses "
            "every step; set checkpoint.save_interval=20"
        )
    cut = [f"rollout.top_p={rollout.top_p:g}"] if rollout.top_p < 1 else []
    cut += [f"rollout.top_k={rollout.top_k}"] if rollout.top_k > 0 else []
    if cut:
        yield (
            f"{' and '.join(cut)}: training does not see what sampling cuts off. Log-probs on both sides are those of "
            "the whole distribution, so ratios, algorithm.correction and rollout.mismatch leave it out, and tokens "
            "that are never sampled may lose their probability; set rollout.top_p=1 and rollout.top_k=0, and lower "
            "rollout.temperature for fewer unlikely tokens"
        )
