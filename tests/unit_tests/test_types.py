"""Records of rows with the fields that a caller gives, the others blank."""

from __future__ import annotations

import pytest
import torch

from mega_rl.types import Experience, Rollout, response_mask

TOKENS = torch.tensor([[5, 6, 7, 0], [5, 6, 7, 8], [5, 0, 0, 0]])
PROMPT_LENGTHS, LENGTHS = torch.tensor([1, 2, 1]), torch.tensor([3, 4, 1])
RESPONSES = [[False, True, True, False], [False, False, True, True], [False] * 4]


def test_response_tokens_lie_between_prompt_and_padding() -> None:
    assert response_mask(PROMPT_LENGTHS, LENGTHS, width=4).tolist() == RESPONSES


@pytest.mark.parametrize("record", [Rollout, Experience])
def test_fields_that_are_not_given_are_blank(record: type[Rollout] | type[Experience]) -> None:
    rows = record.from_rows(TOKENS, prompt_lengths=PROMPT_LENGTHS, lengths=LENGTHS)
    assert list(rows.batch_size) == [3]
    numbers = torch.tensor([[0, 1, 1, 0], [0, 0, 2, 2], [0] * 4])
    given = {"tokens": TOKENS, "prompt_lengths": PROMPT_LENGTHS, "lengths": LENGTHS}
    blank = {
        "loss_mask": torch.tensor(RESPONSES),
        "finished": torch.ones(3).bool(),
        "prompt_index": torch.arange(3),
        "rows": numbers,
    }
    for name, field in rows.items():
        expected = (given | blank).get(name)
        if field is not None:
            assert torch.equal(field, torch.zeros_like(field) if expected is None else expected), name


def test_given_fields_are_kept() -> None:
    mask = torch.ones(3, 4, dtype=torch.bool)
    rows = Rollout.from_rows(TOKENS, prompt_lengths=PROMPT_LENGTHS, lengths=LENGTHS, loss_mask=mask, failed=mask[:, 0])
    assert torch.equal(rows.loss_mask, mask)
    assert rows.failed is not None
    assert torch.equal(rows.failed, mask[:, 0])


@pytest.mark.parametrize("record", [Rollout, Experience])
def test_an_unknown_field_is_refused(record: type[Rollout] | type[Experience]) -> None:
    with pytest.raises(AttributeError, match="old_logprob'"):
        record.from_rows(TOKENS, prompt_lengths=PROMPT_LENGTHS, lengths=LENGTHS, old_logprob=torch.zeros(3, 4))
