"""Settings of validations and of `mega-rl eval`."""

from __future__ import annotations

from dataclasses import dataclass

from mega_rl.config.setting import setting


@dataclass(frozen=True)
class ValidationConfig:
    """Samples of held-out prompts, every trainer.val_interval steps."""

    n: int = setting(1, "Samples of each prompt.", unit="samples", min=1, max=1024)
    temperature: float = setting(0.0, "Sampling temperature of evaluations; 0 is greedy.", min=0.0)
    top_p: float = setting(1.0, "Probability mass that is sampled from; 1 keeps all tokens.", above=0.0, max=1.0)
    top_k: int = setting(0, "Most likely tokens that are sampled from; 0 keeps all.", unit="tokens", min=0)
    max_new_tokens: int = setting(
        0, "Longest response of evaluations; 0 takes rollout.max_new_tokens.", unit="tokens", min=0
    )
    chunk: int = setting(
        8192, "Samples that are drawn and scored together; bounds memory and changes no number.", unit="samples", min=1
    )
    k: list[int] = setting([], "Values of k for pass@k and maj@k; empty takes 1 and n if n is above 1.")
    sets: dict[str, object] = setting(
        {},
        "Further held-out sets by name: {gsm8k: a.jsonl, math: [b.jsonl, c.jsonl]}. Their metrics are "
        "val/gsm8k/... and val/math/...",
    )
    right_above: float = setting(0.5, "A sample with a reward above this is right.")
    right_part: str = setting("", "Named part of the reward that decides this; empty: the reward.")
    answer_of: str = setting(
        "",
        "Function path/to/file.py:name of a response's answer for maj@k, or None; empty: the last \\boxed{}, else the "
        "text after ####, else the response.",
    )

    @property
    def counted(self) -> tuple[int, ...]:
        """Return the numbers of samples that pass@k and maj@k are reported of; () where only rewards are."""
        usual = [1, self.n] if self.n > 1 else []
        return tuple(sorted(self.k or usual))
