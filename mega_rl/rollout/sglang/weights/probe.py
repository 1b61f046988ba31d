"""Comparison of a server with the trainer: log-probs of greedy tokens after a fixed prompt."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mega_rl.parallel.agreement import merge_failures
from mega_rl.protocols import Ranks
from mega_rl.rollout.sglang.generation.samples import NUCLEUS_OF_ONE, hidden_bias
from mega_rl.rollout.sglang.http.control import Control, ServerError, each
from mega_rl.types import Rollout, TokenOutputs

_PROMPT_TOKENS = 8


# Largest |trainer - server| in nats: of the mean over the tokens of a probe, and of each token. A logit of 16 to 32 in
# bf16 is a multiple of 0.125, one of 32 to 64 of 0.25: two healthy engines differ by such a step in some tokens, so
# only the mean says anything.
LIMITS = {"float32": (1e-4, 1e-4), "bfloat16": (0.15, 1.0), "float16": (0.15, 1.0)}


@dataclass(frozen=True)
class Probe:
    """Compares servers with the trainer. Collective over `ranks`, all of the run's."""

    evaluate: Callable[[Rollout], TokenOutputs]  # the actor's log-probs; collective, the same rows on every rank
    ranks: Ranks
    vocab_size: int
    temperature: float  # divides the trainer's logits
    num_tokens: int
    limits: tuple[float, float]  # for the mean and for each token, as `LIMITS`
    hidden_token_ids: tuple[int, ...] = ()  # probability 0 in the trainer

    def __call__(self, controls: Mapping[int, Control], servers: Sequence[int]) -> tuple[dict[int, str], float]:
        """Return (reason by failed server, largest difference of a token in nats), equal everywhere.

        controls: of the servers that this rank steers.
        """
        prompt = probe_prompt(self.vocab_size)
        asked = [i for i in servers if i in controls]
        answers, failed = each(asked, lambda i: self._ask(controls[i], prompt))
        failed = merge_failures(failed, self.ranks)
        left = [i for i in servers if i not in failed]
        if not left:
            return failed, 0.0
        # One rank steers each server and the others hold zeros, so the sum is that rank's values.
        own = torch.zeros(2, len(left), self.num_tokens, dtype=torch.float64)
        for row, server in enumerate(left):
            if server in answers:
                own[0, row], own[1, row] = torch.tensor(answers[server], dtype=torch.float64)
        tokens, theirs = self.ranks.sum(own)
        ours = self._own_logprobs(prompt, tokens.long())
        difference = (ours - theirs).abs()
        difference = torch.where(difference.isnan(), math.inf, difference)
        # The ranks that share a model agree to the bit; replicas of it need not.
        difference = self.ranks.max(difference)
        for row, server in enumerate(left):
            mean, largest = float(difference[row].mean()), float(difference[row].max())
            if mean > self.limits[0] or largest > self.limits[1]:  # not a number became infinite above
                failed[server] = self._disagreement(server, tokens[row], theirs[row], ours[row], difference[row])
        return merge_failures(failed, self.ranks), float(difference.max())

    def _ask(self, control: Control, prompt: Sequence[int]) -> tuple[list[float], list[float]]:
        """Return (tokens, log-probs) of one server's greedy response."""
        body = {
            "input_ids": list(prompt),
            "sampling_params": {
                "max_new_tokens": self.num_tokens,
                "temperature": self.temperature,
                "top_p": NUCLEUS_OF_ONE,  # greedy, with log-probs at the temperature, as the trainer's are
                "ignore_eos": True,
                **hidden_bias(self.hidden_token_ids),
            },
            "return_logprob": True,
        }
        answer = control.object("POST", "/generate", body)
        try:
            pairs = [(float(entry[0]), int(entry[1])) for entry in answer["meta_info"]["output_token_logprobs"]]
            tokens = [int(token) for token in answer["output_ids"]]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise _malformed(control, f"{type(error).__name__}: {error}") from None
        good = all(0 <= token < self.vocab_size and math.isfinite(logprob) for logprob, token in pairs)
        if not good or tokens != [token for _, token in pairs] or len(tokens) != self.num_tokens:
            raise _malformed(control, f"{tokens} with {pairs}; {self.num_tokens} were asked for")
        return [float(token) for token in tokens], [logprob for logprob, _ in pairs]

    def _own_logprobs(self, prompt: Sequence[int], responses: Tensor) -> Tensor:
        """Return the trainer's log-probs [R, N] float64 of `responses` [R, N] int64 after the prompt."""
        rows, first = responses.size(0), len(prompt)
        tokens = torch.cat([torch.tensor(prompt).expand(rows, first), responses], dim=1)
        outputs = self.evaluate(
            Rollout.from_rows(
                tokens,
                prompt_lengths=torch.full((rows,), first),
                lengths=torch.full((rows,), tokens.size(1)),
            )
        )
        assert outputs.logprobs is not None, "the model that evaluates a probe has no log-probs"
        return outputs.logprobs[:, first:].double()

    def _disagreement(self, server: int, tokens: Tensor, theirs: Tensor, ours: Tensor, difference: Tensor) -> str:
        worst = int(difference.argmax())
        return (
            f"SGLang server {server}: probe token {worst} (id {int(tokens[worst])}) has log-prob "
            f"{float(theirs[worst]):.7g} at the server and {float(ours[worst]):.7g} at the trainer, apart by "
            f"{float(difference[worst]):.3g}, limit {self.limits[1]:g}; "
            f"the mean over {len(difference)} tokens is {float(difference.mean()):.3g}, limit {self.limits[0]:g}"
        )


def probe_prompt(vocab_size: int) -> tuple[int, ...]:
    """Return eight token ids, evenly spaced over the vocabulary."""
    return tuple((2 * i + 1) * vocab_size // (2 * _PROMPT_TOKENS) for i in range(_PROMPT_TOKENS))


def _malformed(control: Control, what: str) -> ServerError:
    return ServerError(control.endpoint, "/generate", f"no answer to a probe: {what}")
