"""HFRolloutEngine against transformers itself, and against itself in other batches."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from mega_rl.agents.environment import TurnRequest, TurnSampling
from mega_rl.errors import UserError
from mega_rl.rollout import decoding
from mega_rl.rollout.decoding import GrowingLayer
from mega_rl.rollout.embedded import checksum
from mega_rl.rollout.sampling import Sampler
from mega_rl.types import Draws, Prompt, Rollout
from tests.unit_tests.rollout.tiny_qwen3 import (
    EOS_ID,
    VOCAB_SIZE,
    Checkpoint,
    make_checkpoint,
    make_engine,
    make_prompts,
)

LENGTHS = [5, 1, 9, 3, 3, 7]
SEED = (11, 4)
STOPS = list(range(0, VOCAB_SIZE, 8))  # common enough for responses of every length


def responses(rollout: Rollout) -> dict[tuple[int, int], tuple[list[int], bool, Tensor]]:
    """(prompt_index, sample_index) -> response tokens, finished, log-probs."""
    actual = {}
    for row in range(rollout.tokens.shape[0]):
        start, stop = int(rollout.prompt_lengths[row]), int(rollout.lengths[row])
        key = int(rollout.prompt_index[row]), int(rollout.sample_index[row])
        logprobs = rollout.rollout_logprobs[row, start:stop]
        actual[key] = rollout.tokens[row, start:stop].tolist(), bool(rollout.finished[row]), logprobs
    return actual


def assert_same_samples(left: Rollout, right: Rollout) -> None:
    """Rows that both hold are the same tokens; log-probs differ by rounding of other matrix shapes only."""
    first, second = responses(left), responses(right)
    assert first.keys() & second.keys()
    for key in first.keys() & second.keys():
        assert first[key][:2] == second[key][:2], key
        torch.testing.assert_close(first[key][2], second[key][2], rtol=0, atol=1e-5)


# -- the shape of a rollout --------------------------------------------------------------------------------------------


def test_rows_are_prompt_then_response_then_padding(checkpoint: Checkpoint) -> None:
    prompts = make_prompts(LENGTHS)
    rollout = make_engine(checkpoint).generate(prompts, list(range(10, 16)), n=3, seed=SEED)
    assert rollout.batch_size == torch.Size([18])
    assert rollout.prompt_index.tolist() == [p for p in range(10, 16) for _ in range(3)]
    assert rollout.sample_index.tolist() == [0, 1, 2] * 6
    assert rollout.tokens.shape[1] == int(rollout.lengths.max())
    assert rollout.weight_version.tolist() == [1] * 18
    types = {"tokens": torch.int64, "loss_mask": torch.bool, "rollout_logprobs": torch.float32, "end": torch.int8}
    for name, dtype in types.items():
        assert rollout.get(name).dtype == dtype
    for row in range(18):
        prompt, length = prompts[row // 3].token_ids, int(rollout.lengths[row])
        assert tuple(rollout.tokens[row, : len(prompt)].tolist()) == prompt
        assert int(rollout.prompt_lengths[row]) == len(prompt)
        expected_mask = [len(prompt) <= column < length for column in range(rollout.tokens.shape[1])]
        assert rollout.loss_mask[row].tolist() == expected_mask
        assert not rollout.tokens[row, length:].any()
        assert not rollout.rollout_logprobs[row][~rollout.loss_mask[row]].any()
        assert 1 <= length - len(prompt) <= 12


# -- a sample depends on nothing but its own prompt and counter -------------------------------------------------------


def test_samples_do_not_depend_on_batches_order_or_company(checkpoint: Checkpoint) -> None:
    prompts, index = make_prompts(LENGTHS), list(range(6))
    whole = make_engine(checkpoint, stop_token_ids=STOPS).generate(prompts, index, n=4, seed=SEED)
    assert {finished for _, finished, _ in responses(whole).values()} == {True, False}, "both ways to end are covered"
    for batch_size in (1, 2, 5, 7):
        assert_same_samples(
            whole,
            make_engine(checkpoint, stop_token_ids=STOPS, batch_size=batch_size).generate(
                prompts, index, n=4, seed=SEED
            ),
        )
    engine = make_engine(checkpoint, stop_token_ids=STOPS)
    backwards = engine.generate(prompts[::-1], index[::-1], n=4, seed=SEED)
    assert backwards.prompt_index.tolist() == [p for p in reversed(index) for _ in range(4)]
    assert_same_samples(whole, backwards)
    assert_same_samples(whole, engine.generate(prompts[2:4], [2, 3], n=4, seed=SEED))
    assert_same_samples(whole, engine.generate(prompts[5:], [5], n=2, seed=SEED))


# -- against transformers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
def test_logprobs_equal_a_fresh_forward(checkpoint: Checkpoint, temperature: float, greedy: bool) -> None:
    engine = make_engine(checkpoint, sampler=Sampler(temperature, top_k=20, top_p=0.95))
    rollout = engine.generate(make_prompts(LENGTHS), list(range(6)), n=2, seed=SEED, greedy=greedy)
    for row in range(12):
        start, stop = int(rollout.prompt_lengths[row]), int(rollout.lengths[row])
        tokens = rollout.tokens[row, :stop]
        with torch.no_grad():
            logits = checkpoint.model(tokens[None]).logits[0].double()
        expected = (logits / temperature).log_softmax(-1)[torch.arange(start - 1, stop - 1), tokens[start:]]
        # Float32 model, sums in another order.
        torch.testing.assert_close(rollout.rollout_logprobs[row, start:stop].double(), expected, rtol=0, atol=1e-5)


def test_greedy_equals_transformers_greedy(checkpoint: Checkpoint) -> None:
    prompts = make_prompts([*LENGTHS, 12, 2, 6, 4])
    rollout = make_engine(checkpoint, batch_size=4).generate(prompts, list(range(10)), n=1, seed=SEED, greedy=True)
    ours = responses(rollout)
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt.token_ids])
        theirs = checkpoint.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0
        )
        assert ours[i, 0][0] == theirs[0, len(prompt.token_ids) :].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_model_from_config_equals_from_pretrained(tmp_path: Path, family: str, tied: bool, dtype: torch.dtype) -> None:
    """Weights through load_weights, buffers (rotary frequencies) from the config: every logit bit for bit."""
    made = make_checkpoint(tmp_path / "qwen3", tied=tied)
    if family != "qwen3":
        kind = {"qwen2": Qwen2Config, "llama": LlamaConfig}[family]
        others = ("model_type", "architectures", "head_dim")
        settings = {k: v for k, v in made.model.config.to_dict().items() if k not in others}
        rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
        rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
        settings |= {"rope_parameters": rope} if family == "llama" else {}
        AutoModelForCausalLM.from_config(kind(**settings), dtype=dtype).save_pretrained(tmp_path / family)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / family, dtype=dtype).eval()
    engine = make_engine(Checkpoint(path=tmp_path / family, model=reference), dtype=dtype)
    ids = torch.randint(3, VOCAB_SIZE, (2, 20), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        assert torch.equal(engine.model(ids).logits, reference(ids).logits)
    assert {p.dtype for p in engine.model.parameters()} == {dtype}


def test_sliding_window_models_generate_as_transformers_does(tmp_path: Path) -> None:
    """Their cache drops old tokens, so it is transformers' own."""
    made = make_checkpoint(
        tmp_path, use_sliding_window=True, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    )
    prompts = make_prompts([7, 3])
    ours = responses(make_engine(made).generate(prompts, [0, 1], n=1, seed=SEED, greedy=True))
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt.token_ids])
        theirs = made.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0
        )
        assert ours[i, 0][0] == theirs[0, len(prompt.token_ids) :].tolist()


class Waits(TorchDispatchMode):
    """Number of times that the host would wait for a device to know which rows are finished."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.nonzero.default
        return func(*args, **(kwargs or {}))


def test_a_device_is_seldom_asked_who_is_finished(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every 16 tokens, and the samples are those of a look at each token."""
    prompts, index = make_prompts(LENGTHS), list(range(6))
    engine = make_engine(checkpoint, stop_token_ids=STOPS, max_new_tokens=24)
    with Waits() as often:
        expected = engine.generate(prompts, index, n=4, seed=SEED)
    monkeypatch.setattr(decoding, "CHECK_TOKENS", {})
    with Waits() as seldom:
        assert_same_samples(expected, engine.generate(prompts, index, n=4, seed=SEED))
    assert seldom.count <= 2 < 8 < often.count  # one of them in the loop


# -- how a response ends ----------------------------------------------------------------------------------------------


def test_a_response_holds_its_stop_token_and_nothing_after_it(checkpoint: Checkpoint) -> None:
    prompts, index = make_prompts(LENGTHS), list(range(6))
    free = responses(make_engine(checkpoint).generate(prompts, index, n=4, seed=SEED))
    extra = sorted({tokens[2] for tokens, _, _ in free.values() if len(tokens) > 2 and tokens[2] != EOS_ID})[:2]
    stopped = responses(make_engine(checkpoint, stop_token_ids=extra).generate(prompts, index, n=4, seed=SEED))
    stops = {EOS_ID, *extra}
    for key, (tokens, finished, _) in stopped.items():
        ends = [place for place, token in enumerate(tokens) if token in stops]
        assert ends == ([len(tokens) - 1] if finished else [])
        assert finished or len(tokens) == 12
        # Up to its end it is the response that the run without extra stops gives.
        assert free[key][0][: len(tokens)] == tokens
    assert sum(finished for _, finished, _ in stopped.values()) > sum(finished for _, finished, _ in free.values())


def test_generation_config_names_the_end_of_sequence_and_nothing_else(checkpoint: Checkpoint, tmp_path: Path) -> None:
    shutil.copytree(checkpoint.path, tmp_path / "model")
    prompts, index = make_prompts(LENGTHS), list(range(6))
    free = make_engine(checkpoint).generate(prompts, index, n=2, seed=SEED)
    some_token = int(free.tokens[0, int(free.prompt_lengths[0])])
    settings = {
        "eos_token_id": [some_token],
        "repetition_penalty": 5.0,
        "temperature": 0.1,
        "do_sample": True,
        "top_k": 1,
    }
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(settings))
    rollout = make_engine(Checkpoint(path=tmp_path / "model", model=checkpoint.model)).generate(
        prompts, index, n=2, seed=SEED
    )
    assert responses(rollout)[0, 0][:2] == ([some_token], True)
    for key, (tokens, finished, _) in responses(rollout).items():
        assert not finished or tokens[-1] == some_token
        shared = min(len(tokens), len(responses(free)[key][0]))
        assert tokens[:shared] == responses(free)[key][0][:shared]


def test_padding_takes_no_positions(checkpoint: Checkpoint) -> None:
    """Rotary scores see distances only, but scaled and learned positions do not: each prompt starts at 0."""
    engine = make_engine(checkpoint, max_new_tokens=2)
    seen: list[list[list[int]]] = []
    engine.model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["position_ids"].tolist()), with_kwargs=True
    )
    engine.generate(make_prompts([2, 4]), [0, 1], n=1, seed=SEED)
    assert seen == [[[0, 0, 0, 1], [0, 1, 2, 3]], [[2], [4]]]


def test_an_evaluation_has_a_length_of_its_own(checkpoint: Checkpoint) -> None:
    """Longer responses than those of training begin as they do; at temperature 0 they are greedy."""
    engine, prompts = make_engine(checkpoint, stop_token_ids=[VOCAB_SIZE - 1]), make_prompts([3, 5])
    usual = engine.generate(prompts, [0, 1], n=2, seed=SEED, draws=Draws(2, 1.0))
    longer = engine.generate(prompts, [0, 1], n=2, seed=SEED, draws=Draws(2, 1.0, max_new_tokens=40))
    assert int((longer.lengths - longer.prompt_lengths).max()) > 12
    for row in range(4):
        same = int(usual.lengths[row])
        assert longer.tokens[row, :same].tolist() == usual.tokens[row, :same].tolist()
    greedy = engine.generate(prompts, [0, 1], n=1, seed=SEED, greedy=True)
    drawn = engine.generate(prompts, [0, 1], n=1, seed=(9,), draws=Draws(1, 0.0, max_new_tokens=12))
    assert drawn.tokens.tolist() == greedy.tokens.tolist()
    with pytest.raises(UserError, match=r"5 tokens and its response up to 60.*validation.max_new_tokens"):
        engine.generate(prompts, [0, 1], n=1, seed=SEED, draws=Draws(1, 1.0, max_new_tokens=60))


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_prompts_that_do_not_fit_are_refused(checkpoint: Checkpoint) -> None:
    engine = make_engine(checkpoint)
    with pytest.raises(UserError, match=r"53 tokens.*up to 12.*max_position_embeddings=64"):
        engine.generate(make_prompts([53]), [0], n=1, seed=SEED)
    with pytest.raises(UserError, match=r"rows \[8\]"):
        engine.generate([Prompt(index=8, token_ids=(), text="", answer="")], [0], n=1, seed=SEED)
    with pytest.raises(ValueError, match="zip"):
        engine.generate(make_prompts([3]), [0, 1], n=1, seed=SEED)


def test_logits_that_are_not_finite_stop_the_run(checkpoint: Checkpoint) -> None:
    engine = make_engine(checkpoint)
    weights = dict(checkpoint.model.state_dict())
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], torch.nan)
    engine.load_weights(weights.items())
    with pytest.raises(RuntimeError, match=r"not finite: prompt_index=7, sample_index=0, turn 0"):
        engine.generate(make_prompts([3]), [7], n=1, seed=SEED)


# -- weights ----------------------------------------------------------------------------------------------------------


def test_weights_take_effect_and_carry_their_version(checkpoint: Checkpoint, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path, seed=5)
    prompts = make_prompts([5, 4])
    engine = make_engine(checkpoint)
    before = engine.generate(prompts, [0, 1], n=2, seed=SEED)
    engine.load_weights(other.model.state_dict().items())
    engine.finish_update(9)
    after = engine.generate(prompts, [0, 1], n=2, seed=SEED)
    assert_same_samples(after, make_engine(other).generate(prompts, [0, 1], n=2, seed=SEED))
    assert responses(before)[0, 0][0] != responses(after)[0, 0][0]
    assert after.weight_version.tolist() == [9] * 4


def test_bad_bucket_lists_everything_and_writes_nothing(checkpoint: Checkpoint) -> None:
    engine = make_engine(checkpoint)
    name = "model.layers.0.mlp.up_proj.weight"
    held = engine.checksums([name])
    bucket = [
        (name, torch.ones(48, 32)),
        ("model.layers.7.mlp.up_proj.weight", torch.ones(48, 32)),
        ("model.norm.weight", torch.ones(31)),
    ]
    with pytest.raises(
        ValueError, match=r"(?s)layers\.7.*no such weight.*norm\.weight: shape \[31\], the model's is \[32\]"
    ):
        engine.load_weights(bucket)
    assert engine.checksums([name]) == held


def test_checksums_are_of_what_the_model_computes_with(checkpoint: Checkpoint) -> None:
    engine = make_engine(checkpoint, dtype=torch.bfloat16)
    name = "model.norm.weight"
    assert engine.checksums([name]) == {name: checksum(checkpoint.model.state_dict()[name], torch.bfloat16)}
    with torch.no_grad():
        engine.model.get_parameter(name)[3] += 1
    assert engine.checksums([name])[name] != checksum(checkpoint.model.state_dict()[name], torch.bfloat16)


def test_a_limit_cuts_a_response_and_changes_nothing_before(checkpoint: Checkpoint) -> None:
    """Limits of each turn, in one batch and in several: the beginning of the response without a limit."""
    prompts, limits = make_prompts(LENGTHS), [1, 4, 2, 16, 3, 5]
    for size in (256, 4):
        engine = make_engine(checkpoint, stop_token_ids=STOPS, max_new_tokens=16, batch_size=size)
        whole = responses(engine.generate(prompts, list(range(6)), n=2, seed=SEED))
        asked = [TurnRequest(prompts[place].token_ids, (place, sample, 0), limits[place]) for place, sample in whole]
        for one, turn in zip(asked, engine._turns(asked, *engine._drawing(TurnSampling(SEED))), strict=True):
            tokens, finished, logprobs = whole[one.key[:2]]
            assert list(turn.token_ids) == tokens[: one.limit]
            assert turn.stopped == (finished and len(tokens) <= one.limit)
            torch.testing.assert_close(torch.tensor(turn.logprobs), logprobs[: one.limit], rtol=0, atol=1e-5)
        assert any(len(tokens) > limits[key[0]] for key, (tokens, *_) in whole.items())


def test_long_responses_outgrow_the_first_room_of_the_cache(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path, max_position_embeddings=512, eos_token_id=None)
    prompts = make_prompts([9, 4])
    rollout = make_engine(made, max_new_tokens=200).generate(prompts, [0, 1], n=2, seed=SEED)
    assert rollout.lengths.tolist() == [209, 209, 204, 204]
    tokens = rollout.tokens[0]
    with torch.no_grad():
        expected = made.model(tokens[None]).logits[0].double().log_softmax(-1)[torch.arange(8, 208), tokens[9:]]
    torch.testing.assert_close(rollout.rollout_logprobs[0, 9:].double(), expected, rtol=0, atol=2e-5)


def test_the_cache_grows_to_the_longest_sequence_and_no_further() -> None:
    """64 tokens of room first, twice as much when they are full, 200 at most; tokens stay."""
    layer, rooms = GrowingLayer(max_tokens=200), set()
    tokens = torch.randn(2, 1, 200, 4)
    for first, last in [(0, 30), *((token, token + 1) for token in range(30, 200))]:
        keys, values = layer.update(tokens[:, :, first:last], -tokens[:, :, first:last])
        rooms.add(keys.untyped_storage().nbytes() // (2 * 4 * 4))
        assert torch.equal(keys, tokens[:, :, :last])
        assert torch.equal(values, -tokens[:, :, :last])
    assert sorted(rooms) == [94, 189, 200]
