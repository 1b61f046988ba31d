"""Decoding loop of the embedded rollout engine; it needs only a Hugging Face model's forward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from mega_rl.parallel.vocab import hide
from mega_rl.rollout.counter_rng import uniform_at
from mega_rl.rollout.embedded.sampling import Sampler
from mega_rl.tracking import progress
from mega_rl.types import IdRanges

# Finished rows leave the batch when at least this share of it is finished: each removal copies the cache once.
_SHRINK_SHARE = 0.25
# Tokens from one look at who is finished to the next. On a GPU the host waits for the device to look, and a finished
# row costs little; on a CPU a finished row costs as much as any other.
CHECK_TOKENS = {"cpu": 1}
_CHECK_TOKENS_ON_DEVICE = 16


@dataclass(frozen=True)
class Decoded:
    """Responses of one batch: R rows of at most N tokens. Past a row's length tokens and log-probs mean nothing."""

    tokens: Tensor  # [R, N] int64
    logprobs: Tensor  # [R, N] float32
    lengths: Tensor  # [R] int64
    finished: Tensor  # [R] bool


class DecodingLoop:
    """Decoding of one batch: each prompt is read once, then the rows that continue it are sampled.

    Of transformers it needs a model's forward and a cache (`make_cache`). transformers' own `generate` draws V random
    numbers per row and token from the global generator, which costs more than the model on a CPU and ties a sample to
    its batch, and it computes finished rows to the end.
    """

    def __init__(
        self,
        *,
        prompt_of_row: Tensor,  # [R] int64, into the prompts that `run` is given
        keys: Tensor,  # [R] int64, random stream of each row
        sampler: Sampler,
        greedy: bool,
        max_new_tokens: int,
        stop_token_ids: Tensor,  # [number of stop ids] int64
        cache: Cache,  # an empty one
        hidden: IdRanges = (),  # tokens that are never chosen
    ) -> None:
        self._prompt_of_row, self._keys = prompt_of_row, keys
        self._sampler, self._greedy, self._hidden = sampler, greedy, hidden
        self._max_new_tokens, self._stop_token_ids = max_new_tokens, stop_token_ids
        self._cache = cache

    def run(self, model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor) -> Decoded:
        """Return the responses of all rows; a loop runs once, since it fills its cache.

        input_ids: [P, L] int64, left-padded prompts; attention_mask: [P, L] int64, 0 on padding.
        """
        num_rows, device = self._prompt_of_row.shape[0], input_ids.device
        tokens = torch.zeros(num_rows, self._max_new_tokens, dtype=torch.int64, device=device)
        logprobs = torch.zeros(num_rows, self._max_new_tokens, dtype=torch.float32, device=device)
        lengths = torch.full((num_rows,), self._max_new_tokens, dtype=torch.int64, device=device)
        finished = torch.zeros(num_rows, dtype=torch.bool, device=device)
        check_tokens = CHECK_TOKENS.get(device.type, _CHECK_TOKENS_ON_DEVICE)
        rows = torch.arange(num_rows, device=device)  # row of the result that each row of the shrinking batch fills
        logits, mask, positions = self._prefill(model, input_ids, attention_mask)
        for step in range(self._max_new_tokens):
            progress.note(f"token {step + 1}/{self._max_new_tokens}")
            if self._greedy:
                drawn, logprob = self._sampler.most_likely(logits)
            else:
                drawn, logprob = self._sampler.draw(logits, uniform_at(self._keys[rows], step))
            tokens[rows, step], logprobs[rows, step] = drawn, logprob
            newly = (drawn[:, None] == self._stop_token_ids).any(-1) & ~finished[rows]
            lengths[rows] = torch.where(newly, step + 1, lengths[rows])
            finished[rows] |= newly
            if step + 1 == self._max_new_tokens:
                break
            if (step + 1) % check_tokens == 0:
                keep = (~finished[rows]).nonzero()[:, 0]
                if not len(keep):
                    break
                if len(keep) <= (1.0 - _SHRINK_SHARE) * len(rows):
                    self._cache.batch_select_indices(keep)
                    rows, drawn, mask, positions = rows[keep], drawn[keep], mask[keep], positions[keep]
            logits = self._forward(model, drawn[:, None], mask[:, : input_ids.shape[1] + step + 1], positions + step)
        return Decoded(tokens=tokens, logprobs=logprobs, lengths=lengths, finished=finished)

    def _prefill(self, model: PreTrainedModel, input_ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(logits [R, V] after the prompt, mask [R, L + N], position [R, 1] of the first response token)."""
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
        logits = self._forward(model, input_ids, mask, positions)
        self._cache.batch_select_indices(self._prompt_of_row)
        room = mask.new_ones(mask.shape[0], self._max_new_tokens)
        of_row = self._prompt_of_row
        return logits[of_row], torch.cat([mask, room], dim=1)[of_row], positions[of_row, -1:] + 1

    def _forward(self, model: PreTrainedModel, input_ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """[rows, V] logits of the last token."""
        output = model(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            past_key_values=self._cache,
        )
        return hide(output.logits[:, -1], self._hidden)
