"""Each role's model is the one that its path names, the actor's where there is none, on both engines.

Sizes, families and vocabularies of the roles may differ; what they say is what transformers' own classes say of their
checkpoints.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mega_rl.cli import app as cli
from mega_rl.rollout.tokens import hidden_tokens, ids_of
from tests.helpers.distributed import run_ranks
from tests.helpers.models import random_experience, write_digit_tokenizer, write_tiny_checkpoint
from tests.unit_tests.rewards.model_cases import write_other_tokenizer, write_reward_model
from tests.workers.role_cases import case

ENGINES = ("megatron", "fsdp")
TOKENS = 44  # of the tokenizer that all checkpoints share: the smallest vocabulary that a model can have
TOLERANCE = 1e-4  # nats or values, fp32
# Of FP32 against float64, in units of the largest: values reach 116 here, as sums of terms of that size.
OF_THE_LARGEST = 2e-6
# checkpoint -> (family, hidden size, layers, vocabulary)
MODELS = {
    "small": ("qwen3", 896, 1, 50),
    "large": ("qwen3", 1536, 2, 50),
    "more tokens": ("qwen3", 1536, 1, 64),
    "fewer tokens": ("qwen3", 896, 1, TOKENS),
    "llama": ("llama", 896, 1, 50),
}
# name -> (lines of the recipe's section model, command line, checkpoints of actor, critic and reference)
RUNS: dict[str, tuple[dict[str, str], dict[str, str], tuple[str, str, str]]] = {
    "paths of their own, by file": (
        {"path": "small", "ref_path": "large", "critic_path": "critic"},
        {},
        ("small", "critic", "large"),
    ),
    "paths of their own, by command line": (
        {"path": "small", "ref_path": "small"},
        {"ref_path": "large", "critic_path": "critic"},
        ("small", "critic", "large"),
    ),
    "none of their own": ({"path": "large"}, {}, ("large", "large", "large")),
    "another family, more tokens": (
        {"path": "llama"},
        {"ref_path": "more tokens", "critic_path": "small"},
        ("llama", "small", "more tokens"),
    ),
    "fewer tokens": ({"path": "llama"}, {"ref_path": "fewer tokens"}, ("llama", "llama", "fewer tokens")),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of `MODELS`, and "critic" of hidden size 1536, which has a value head; all with one tokenizer."""
    folder = tmp_path_factory.mktemp("roles")
    for seed, (name, (family, hidden, layers, vocab_size)) in enumerate(MODELS.items()):
        size = {"hidden_size": hidden, "num_hidden_layers": layers, "vocab_size": vocab_size}
        # Log-probs of some nats: weights for a hidden size of 32 would make nearly certain ones.
        write_tiny_checkpoint(folder / name, family=family, seed=seed, initializer_range=0.02, **size)
    write_reward_model(folder / "critic", family="qwen3", hidden_size=1536, num_hidden_layers=1)
    for path in folder.iterdir():
        write_digit_tokenizer(path, vocab_size=TOKENS)
    (folder / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    return folder


def recipe_of(root: Path, models: dict[str, str]) -> str:
    """A recipe, as text, of PPO with a critic and a reference."""
    return json.dumps(
        {
            "model": {"dtype": "fp32", **{key: str(root / name) for key, name in models.items()}},
            "algorithm": {"advantage": "gae", "kl": "reward"},
            "data": {"train_files": [str(root / "train.jsonl")], "max_prompt_tokens": 8},
            "optim": {"lr": 1e-3, "critic_lr": 1e-3},
            "rollout": {"max_new_tokens": 16},
            "trainer": {
                "device": "cpu",
                "timeout_s": 60,
                "prompts_per_step": 4,
                "minibatch_size": 4,
                "microbatch": {"max_tokens": 64},
                "run_dir": str(root / "run"),
            },
        }
    )


def overrides_of(root: Path, models: dict[str, str]) -> list[str]:
    """The command line."""
    return [f"model.{key}={root / name}" for key, name in models.items()]


@pytest.fixture(scope="module", params=ENGINES)
def results(request: pytest.FixtureRequest, root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What every run of one engine says, all rows: two tensor-parallel ranks, or two that share an FSDP model."""
    folder = tmp_path_factory.mktemp("recipes")
    runs = {}
    for number, (name, (by_file, by_line, _)) in enumerate(RUNS.items()):
        recipe = folder / f"{number}.yaml"
        recipe.write_text(recipe_of(root, by_file))
        runs[name] = (str(recipe), overrides_of(root, by_line))
    first, second = run_ranks(2, case, request.param, runs, TOKENS, device="cpu")
    if request.param == "megatron":
        return dict(first)
    for name, said in first.items():
        for role, tensor in said.items():
            if isinstance(tensor, torch.Tensor):
                said[role] = torch.cat([tensor, second[name][role]])
    return dict(first)


@pytest.fixture(scope="module")
def transformers_says(root: Path) -> Callable[[str, str], torch.Tensor]:
    """(checkpoint, role) -> [B, S], what transformers computes of each row alone in float64, 0 off the loss mask."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    batch = random_experience(vocab_size=TOKENS)

    @torch.no_grad()
    def says(name: str, role: str) -> torch.Tensor:
        kind = AutoModelForSequenceClassification if role == "critic" else AutoModelForCausalLM
        model = kind.from_pretrained(root / name, dtype=torch.float64, attn_implementation="eager").eval()
        result = torch.zeros(batch.tokens.shape, dtype=torch.float64)
        for row, length in enumerate(batch.lengths.tolist()):
            tokens = batch.tokens[row : row + 1, :length]
            if role == "critic":
                said = model.score(model.model(tokens).last_hidden_state)[0, :-1, 0]
            else:
                logits = model(tokens).logits[0, :-1]
                logits[:, ids_of(hidden_tokens(root / name), logits.size(1))] = -torch.inf  # no response has them
                said = logits.log_softmax(-1).gather(-1, tokens[0, 1:, None]).squeeze(-1)
            result[row, 1:length] = said
        return result * batch.loss_mask

    return says


@pytest.mark.parametrize("name", list(RUNS))
def test_a_role_says_what_its_own_checkpoint_says(
    results: dict[str, Any], transformers_says: Callable[[str, str], torch.Tensor], name: str
) -> None:
    """By transformers' own classes; a critic whose checkpoint has no head begins with values of 0."""
    for role, checkpoint in zip(("actor", "critic", "reference"), RUNS[name][2], strict=True):
        if role == "critic" and checkpoint != "critic":
            assert not results[name]["critic"].any()
            continue
        expected = transformers_says(checkpoint, role)
        if checkpoint != RUNS[name][2][0]:  # to be told from the actor's
            actors = transformers_says(RUNS[name][2][0], "actor")
            assert (expected - actors).abs().max() > 1000 * TOLERANCE
        atol = OF_THE_LARGEST * float(expected.abs().max())
        torch.testing.assert_close(results[name][role].double(), expected, rtol=0, atol=atol)


def test_sizes_are_those_of_the_paths(results: dict[str, Any], root: Path) -> None:
    """The start-up table's facts: checkpoint, family and parameters of each role, counted in the files."""
    from safetensors import safe_open

    for name, (_, _, checkpoints) in RUNS.items():
        facts = results[name]["facts"]
        assert facts.pop("reward") == ("exact_match", "", None)
        for (role, fact), checkpoint in zip(facts.items(), checkpoints, strict=True):
            with safe_open(root / checkpoint / "model.safetensors", "pt") as file:
                shapes = [file.get_slice(key).get_shape() for key in file.keys()]  # noqa: SIM118 - has no __iter__
                has_head = "score.weight" in file.keys()  # noqa: SIM118
            hidden = json.loads((root / checkpoint / "config.json").read_text())["hidden_size"]
            family = "llama" if checkpoint == "llama" else "qwen3"
            parameters = sum(torch.Size(shape).numel() for shape in shapes)
            head = hidden if role == "critic" and not has_head else 0
            assert fact == (str(root / checkpoint), family, parameters + head), (name, role)
    sizes = {name: results[name]["facts"]["reference"][2] for name in RUNS}
    assert sizes["paths of their own, by file"] > 2 * sizes["fewer tokens"]


def test_without_a_path_the_reference_is_the_actor_at_the_start(results: dict[str, Any]) -> None:
    """Bit for bit, in an engine of its own."""
    said = results["none of their own"]
    assert said["engines"] == ["actor", "critic", "reference"]
    assert torch.equal(said["reference"], said["actor"])


@pytest.mark.parametrize("name", list(RUNS))
def test_the_reference_stays_while_others_learn(results: dict[str, Any], name: str) -> None:
    """Bit for bit; actor and critic have moved."""
    said = results[name]
    assert torch.equal(said["reference later"], said["reference"])
    for role in ("actor", "critic"):
        assert (said[f"{role} later"] - said[role]).abs().max() > 100 * TOLERANCE, role


def test_the_file_and_the_command_line_say_the_same(results: dict[str, Any]) -> None:
    """Bit for bit, over a path in the file that the command line replaces."""
    by_file, by_line = (results[f"paths of their own, by {way}"] for way in ("file", "command line"))
    for role in ("actor", "critic", "reference", "actor later", "critic later"):
        assert torch.equal(by_file[role], by_line[role]), role


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("key", ["ref_path", "critic_path"])
def test_another_tokenizer_is_refused(root: Path, tmp_path: Path, engine: str, key: str) -> None:
    """Through the command: exit code 2, one line of error that names both folders, nothing written."""
    other = tmp_path / "other"
    other.mkdir()
    for file in (root / "large").iterdir():
        (other / file.name).symlink_to(file)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (other / name).unlink()
    write_other_tokenizer(other)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(recipe_of(root, {"path": "small"}))
    output = io.StringIO()
    with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
        code = cli.main(["train", "--config", str(recipe), f"engine.backend={engine}", f"model.{key}={other}"])
    assert code == 2
    (line,) = (line for line in output.getvalue().splitlines() if "error: " in line)
    assert line.startswith(f"error: model.{key}: {other}: its tokenizer is not that of model.path ({root / 'small'}): ")
    assert "take a checkpoint with the same tokenizer" in line
    assert not (root / "run").exists()
