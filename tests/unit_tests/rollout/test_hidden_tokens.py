"""Tokens that no response may hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from mega_rl.rollout.sampling import Sampler
from mega_rl.rollout.tokens import ALL_FURTHER, hidden_tokens, ids_of
from tests.helpers.distributed import run_ranks
from tests.helpers.models import random_experience, write_tiny_checkpoint
from tests.unit_tests.rollout.tiny_qwen3 import VOCAB_SIZE, make_checkpoint, make_engine, make_prompts

IDS = {"<pad>": 0, "a": 1, "<eos>": 2, "b": 4, "c": 5, "!": 8}  # 3, 6 and 7 are holes, 9 and on is unknown


def write_tokenizer(folder: Path, **special: str) -> None:
    tokenizer = Tokenizer(models.WordLevel(vocab=IDS, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


@pytest.mark.parametrize(
    ("special", "extra", "expected"),
    [
        ({"pad_token": "<pad>", "eos_token": "<eos>"}, [], ((0, 1), (3, 4), (6, 8), (9, ALL_FURTHER))),
        ({"pad_token": "<eos>"}, [], ((3, 4), (6, 8), (9, ALL_FURTHER))),  # padding that ends a response
        ({"pad_token": "<pad>"}, [0, 7], ((3, 4), (6, 7), (9, ALL_FURTHER))),  # stop tokens of the run
        ({}, [], ((3, 4), (6, 8), (9, ALL_FURTHER))),
    ],
)
def test_what_the_tokenizer_does_not_know(
    tmp_path: Path, special: dict[str, str], extra: list[int], expected: tuple[tuple[int, int], ...]
) -> None:
    make_checkpoint(tmp_path)
    assert hidden_tokens(tmp_path, extra) == (), "no tokenizer"
    write_tokenizer(tmp_path, **special)
    assert hidden_tokens(tmp_path, extra) == expected
    assert ids_of(expected, 11)[-2:] == [9, 10]


@pytest.mark.parametrize("sampler", [Sampler(temperature=1.5), Sampler(temperature=1.5, top_p=0.9)])
def test_the_embedded_engine_never_says_a_hidden_token(tmp_path: Path, sampler: Sampler) -> None:
    """Its log-probs are those of the distribution over all others, also where the hidden token is the likeliest."""
    checkpoint = make_checkpoint(tmp_path, tied=False)
    with torch.no_grad():
        checkpoint.model.lm_head.weight[7] *= 8.0
    hidden = ((0, 2), (7, 8), (100, ALL_FURTHER))
    banned = set(ids_of(hidden, VOCAB_SIZE))
    engine, free = (make_engine(checkpoint, sampler=sampler, hidden_tokens=ranges) for ranges in (hidden, ()))
    assert banned & set(free.generate(make_prompts([4, 6]), [0, 1], n=16, seed=(1,)).tokens.flatten().tolist())
    for greedy in (False, True):
        rollout = engine.generate(make_prompts([4, 6]), [0, 1], n=16, seed=(1,), greedy=greedy)
        assert not banned & set(rollout.tokens[rollout.loss_mask].tolist())
        with torch.no_grad():
            logits = checkpoint.model(rollout.tokens[:1, : rollout.lengths[0]]).logits[0].double()
        logits[:, sorted(banned)] = -torch.inf
        logp = torch.log_softmax(logits / sampler.temperature, dim=-1)
        places = rollout.loss_mask[0].nonzero().flatten()
        expected = logp[places - 1, rollout.tokens[0, places]]
        torch.testing.assert_close(rollout.rollout_logprobs[0, places].double(), expected, rtol=0, atol=1e-5)


def ranks_train_beside_a_zero_row(rank: int, folders: list[str]) -> dict[str, list[dict[str, torch.Tensor]]]:
    """By engine: log-probs and updated weights of models that differ in the rows of tokens nobody may say."""
    from mega_rl.parallel.accelerator import prepare

    prepare("auto")
    from mega_rl.algorithms.kl import k3
    from mega_rl.algorithms.policy_losses import PPO
    from mega_rl.workers.models import PolicyLoss
    from tests.helpers.engines import exported, make_config, own_rows, running_engine

    loss = PolicyLoss(PPO(0.2, 0.2), kl=None, kl_estimator=k3, entropy_coef=0.01)
    actual: dict[str, list[dict[str, torch.Tensor]]] = {}
    for backend, layout in (("megatron", "tp2"), ("fsdp", "dp2")):
        for folder in folders:
            with running_engine(make_config(Path(folder), layout=layout, engine=backend)) as engine:
                rows = own_rows(random_experience(vocab_size=48), engine)
                logprobs = engine.forward(rows).logprobs
                metrics = engine.train_minibatch(rows, loss, lr=1e-2)
                norm = torch.tensor(metrics["grad_norm"])
                actual.setdefault(backend, []).append({**exported(engine), "logprobs": logprobs, "norm": norm})
    return actual


def test_an_update_is_what_it_is_without_the_zero_row(tmp_path: Path) -> None:
    """Whatever stands in the rows of padding and of unknown ids: log-probs, gradient norm and all other weights."""
    names = ["<pad>", "<eos>", *(f"t{number}" for number in range(46))]  # of 50 ids the last two are unknown
    folders = [write_tiny_checkpoint(tmp_path / kind, family="qwen3", tied=True) for kind in ("zero", "other")]
    for folder, value in zip(folders, (0.0, 0.7), strict=True):
        tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="t0"))
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
        fast.save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        tensors["model.embed_tokens.weight"][[0, 48, 49]] = value
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for zero, other in run_ranks(2, ranks_train_beside_a_zero_row, [str(folder) for folder in folders])[0].values():
        kept = [token for token in range(50) if token not in (0, 48, 49)]
        for name, tensor in zero.items():
            rows = kept if name == "model.embed_tokens.weight" else slice(None)
            assert torch.equal(
                tensor[rows] if tensor.dim() else tensor, other[name][rows] if tensor.dim() else other[name]
            )
