"""Settings of validations and of `mega-rl eval`."""

from __future__ import annotations

from dataclasses import dataclass

from mega_rl.config.setting import setting


@dataclass(frozen=True)
class ValidationConfig:
    """Samples of held-out prompts and what is measured of them; trainer.val_interval says when."""

    n: int = setting(1, "Samples of each prompt.", unit="samples", min=1, max=1024)
    temperature: float = setting(0.0, "Sampling temperature of evaluations; 0 is greedy.", min=0.0)
    top_p: float = setting(1.0, "Probability mass that is sampled from; 1 keeps all tokens.", above=0.0, max=1.0)
    top_k: int = setting(0, "Most likely tokens that are sampled from; 0 keeps all.", unit="tokens", min=0)
    max_new_tokens: int = setting(
        0, "Longest response of evaluations; 0 takes rollout.max_new_tokens.", unit="tokens", min=0
    )
    chunk: int = setting(
        8192,
        "Samples that are drawn and scored together, whole prompts: it bounds memory and requests in flight, and "
        "changes no number.",
        unit="samples",
        min=1,
    )
    k: list[int] = setting(
        [], "Numbers of samples that pass@k and maj@k are of; empty takes 1 and n where n is above 1, else none."
    )
    sets: dict[str, object] = setting(
        {},
        "Further sets of held-out prompts by name, each one of data.val_files or a list of such: {gsm8k: a.jsonl, "
        "math: [b.jsonl, c.jsonl]}. Their metrics are val/gsm8k/... and val/math/...",
    )
    right_above: float = setting(0.5, "A sample with a reward, or a part of it, above this is right.")
    right_part: str = setting("", "Named part of the reward that says whether a sample is right; empty: the reward.")
    answer_of: str = setting(
        "",
        "Function path/to/file.py:name of a response that returns the answer it votes for in maj@k, or None; empty "
        "takes what stands in the last \\boxed{} or after the last ####, else the whole response.",
    )

    @property
    def counted(self) -> tuple[int, ...]:
        """Return the numbers of samples that pass@k and maj@k are reported of; () where only rewards are."""
        usual = [1, self.n] if self.n > 1 else []
        return tuple(sorted(self.k or usual))
