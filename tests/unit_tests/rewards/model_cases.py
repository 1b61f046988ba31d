"""What each rank does in the tests of reward models, and the checkpoints and rollouts that they start from."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from mega_rl.rewards.score import ResponseReader
from mega_rl.types import Prompt, Rollout, ends_of
from tests.helpers.engines import make_config, own_rows, running_engine
from tests.helpers.models import SMALL, TINY, write_digit_tokenizer

CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<eos>\n{% endfor %}"
PROMPTS = [
    Prompt(index=40, token_ids=(4, 12, 5), text="2+3", answer="5"),
    Prompt(index=41, token_ids=(6, 13), text="4-", answer="x", messages=(("system", "be brief"), ("user", "4-"))),
]
LENGTHS = [9, 4, 15, 6, 23, 5]  # of the rows: prompt and response
FAILED = 3  # the row without an answer


def write_reward_model(directory: Path, *, family: str, seed: int = 0, **overrides: Any) -> Path:
    """A random sequence-classification checkpoint with one label, as transformers writes it; vocabulary 50."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**SMALL, **TINY[family], "num_labels": 1, **overrides})
    model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        model.score.weight.copy_(torch.randn_like(model.score.weight))
    model.save_pretrained(directory)
    write_digit_tokenizer(directory, vocab_size=50)
    return directory


def write_other_tokenizer(directory: Path) -> None:
    """A tokenizer of the same characters and others in another order, with brackets and a chat template: `CHAT`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = ["<bos>", "<eos>", "\n", *"[]zyxwvutsrqponmlkjihgfedcba .*=-+9876543210"]
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>")
    fast.chat_template = CHAT
    fast.save_pretrained(directory)


def rollout_of_rows() -> Rollout:
    """Rows of `LENGTHS`, alternately of both prompts, some ended by a stop token and one of them failed."""
    generator = torch.Generator().manual_seed(1)
    index = torch.arange(len(LENGTHS)) % 2
    prompt_lengths = torch.tensor([len(PROMPTS[i].token_ids) for i in index])
    lengths = torch.where(torch.arange(len(LENGTHS)) == FAILED, prompt_lengths, torch.tensor(LENGTHS))
    finished = torch.tensor([True, False, True, False, False, True])
    inside = torch.arange(max(LENGTHS)) < lengths[:, None]
    tokens = torch.randint(2, 42, inside.shape, generator=generator) * inside
    for row, prompt in enumerate(index.tolist()):
        tokens[row, : prompt_lengths[row]] = torch.tensor(PROMPTS[prompt].token_ids)
        if finished[row]:
            tokens[row, lengths[row] - 1] = 1
    return Rollout.from_rows(
        tokens,
        prompt_lengths=prompt_lengths,
        lengths=lengths,
        end=ends_of(finished),
        prompt_index=index,
        sample_index=torch.arange(len(LENGTHS)) // 2,
        failed=torch.arange(len(LENGTHS)) == FAILED,
    )


@torch.no_grad()
def transformers_scores(checkpoint: Path, rows: list[list[int]]) -> torch.Tensor:
    """[B] float32: what transformers' own class says of each row, alone and without padding."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    return torch.stack([model(torch.tensor([ids])).logits.reshape(()) for ids in rows])


def score_on_layouts(rank: int, checkpoint: str, actor: str, layouts: list[str], engine: str) -> dict[str, Any]:
    """This rank's scores of its share of the rows by "layout sampled" and "layout text"; by "layout error" why not."""
    from transformers import AutoTokenizer

    from mega_rl.parallel.comm import GroupRanks
    from mega_rl.rewards.model import ModelScorer, RowLimits, own_tokens, token_rows
    from mega_rl.rewards.score import RewardError

    sampled_with = AutoTokenizer.from_pretrained(actor)
    own = AutoTokenizer.from_pretrained(checkpoint)
    actual: dict[str, Any] = {}
    for layout in layouts:
        config = make_config(Path(checkpoint), layout=layout, engine=engine)
        with running_engine(config, head="value", trainable=False) as model:
            limits = RowLimits(
                vocab_size=50, positions=256, microbatch_tokens=64, multiple=2 * config.engine.megatron.cp
            )
            everyone = GroupRanks(model.groups.world)
            rows = own_rows(rollout_of_rows(), model)  # type: ignore[arg-type]
            for name, same in (("sampled", True), ("text", False)):
                source = token_rows(
                    own,
                    template=None if same else own.chat_template,
                    same_tokenizer=same,
                    rollout_template=None,
                    reader=ResponseReader(lambda ids: str(sampled_with.decode(list(ids), skip_special_tokens=True))),
                )
                worker = ModelScorer(model, source, limits=limits, everyone=everyone)
                actual[f"{layout} {name}"] = worker.score(rows, PROMPTS).totals
            limits = dataclasses.replace(limits, positions=22)
            try:
                ModelScorer(model, own_tokens, limits=limits, everyone=everyone).score(rows, PROMPTS)
            except RewardError as error:
                actual[f"{layout} error"] = str(error)
    return actual
