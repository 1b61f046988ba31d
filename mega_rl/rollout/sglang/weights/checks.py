"""Checks of a server before it gets weights (model, settings, shapes), and a probe of its log-probs afterwards.

SGLang 0.5.21 crashes on a tensor of a wrong shape and ignores an unknown name silently, so the sender checks both.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.hf.config import read_hf_config
from mega_rl.converters.plan.export import export_plan
from mega_rl.converters.plan.parameters import as_on_disk, hf_tensors, ignored_tensors, outside
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.converters.safetensors.reader import CheckpointReader
from mega_rl.errors import UserError, UserErrors
from mega_rl.parallel.agreement import merge_failures
from mega_rl.protocols import Ranks
from mega_rl.rollout.sglang.control import Control, ServerError, each
from mega_rl.rollout.sglang.generation.samples import NUCLEUS_OF_ONE, hidden_bias
from mega_rl.rollout.sglang.server.installation import TESTED
from mega_rl.types import Rollout, TokenOutputs

_SHORT_DTYPES = {"half": "float16", "float": "float32"}


@dataclass(frozen=True)
class ExpectedServer:
    """Model and weights that the trainer will send, and the settings a server needs for them."""

    hf: HFConfig  # the trainer's model
    sent: Mapping[str, tuple[int, ...]]  # shapes by Hugging Face's names
    dtype: str  # the server's weights': "float32"
    tp: int | None = None  # None: any, as a joined server may have
    routing: bool = False  # it has to report the experts of tokens
    adapter: bool = False  # it gets adapters next to the base
    keeps: bool = False  # requests go on over an update with their KV cache


def sent_shapes(sharding: Sharding) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an update's tensors by name."""
    return {name: shape for unit in export_plan(sharding) for name, shape, _ in unit.tensors}


def check_server(control: Control, expected: ExpectedServer) -> list[str]:
    """Return every reason why this server cannot take these weights, one line each.

    Compares /model_info and /server_info and, where the server's checkpoint can be read from here, the names and
    shapes of its tensors. Raises ServerError when the server does not answer.
    """
    problems = mismatches(control.object("GET", "/model_info"), control.object("GET", "/server_info"), expected)
    where = f"SGLang server {control.endpoint.index} at {control.endpoint.url}"
    return [f"{where}: {problem}" for problem in problems]


def mismatches(model: Mapping[str, Any], server: Mapping[str, Any], expected: ExpectedServer) -> list[str]:
    """Return the mismatches of /model_info, /server_info and their checkpoint with `expected`, in words."""
    problems = _wrong_settings(server, expected)
    raw = expected.hf.raw if expected.hf.wrapper is None else expected.hf.wrapper
    for key in ("model_type", "architectures"):
        if key in raw and model.get(key) != raw[key]:
            problems.append(
                f"serves {key}={model.get(key)!r}, the trainer's model is {raw[key]!r}; serve the same model"
            )
    if model.get("is_generation") is not True:
        problems.append("its model does not generate (is_generation is not true); serve a language model")
    path = Path(str(model.get("model_path")))
    readable = (path / "config.json").is_file()
    return problems + (_wrong_checkpoint(path, expected) if readable else _wrong_tensors(expected, None))


def _wrong_settings(server: Mapping[str, Any], expected: ExpectedServer) -> list[str]:
    """Return in words the settings of a server under which an update fails."""
    short = [short for short, name in _SHORT_DTYPES.items() if name == expected.dtype]
    rules: list[tuple[str, tuple[object, ...], str]] = [
        ("version", TESTED, "its endpoints are known for tested releases only"),
        ("pp_size", (1, None), "weights are sent per tensor-parallel rank; use --tp-size"),
        ("quantization", (None, "", "unquant"), "weights are sent unquantised"),
        ("speculative_algorithm", (None, ""), "the draft model would keep its old weights"),
        ("is_embedding", (False, None), "it has to generate"),
        # "auto" means bfloat16 for a checkpoint in float32 too, so it is not accepted.
        ("dtype", (expected.dtype, *short), "start it with --dtype of rollout.dtype"),
    ]
    if server.get("enable_dp_attention") is not True:
        rules.append(("dp_size", (1, None), "without enable_dp_attention weights reach one data-parallel replica only"))
    if expected.routing:
        rules.append(("enable_return_routed_experts", (True,), "rollout.sglang.return_routing=true asks for experts"))
    if expected.adapter:
        rules.append(("enable_lora", (True,), "rollout.sglang.sync.adapter=adapter sends adapters next to the base"))
    if expected.keeps:
        why = "rollout.sglang.sync.in_flight=keep: a step that overlaps an update has tokens of the old weights"
        rules.append(("disable_overlap_schedule", (True,), why))
    if expected.tp is not None:
        rules.append(("tp_size", (expected.tp,), "as rollout.sglang.server.tp"))
    return [
        f"{name}={server.get(name)!r} must be {allowed[0]!r}: {why}"
        for name, allowed, why in rules
        if server.get(name) not in allowed
    ]


def _wrong_checkpoint(path: Path, expected: ExpectedServer) -> list[str]:
    """Return the differences between the trainer's weights and the checkpoint that the server serves, in words."""
    try:
        hf = read_hf_config(path, any_model=True)
        shapes: dict[str, tuple[int, ...]] = {}
        if any(path.glob("*.safetensors")):  # a server with --load-format dummy needs none
            with CheckpointReader(path) as reader:
                aside = outside(hf, reader.tensors, reader.others)
                shapes = {name: info.shape for name, info in reader.tensors.items() if name not in aside}
                hf = as_on_disk(hf, shapes)
    except (UserErrors, UserError, OSError, ValueError, TypeError) as error:
        return [f"its checkpoint {path} cannot be read: {error}"]
    wanted = {name: tensor.shape for name, tensor in hf_tensors(hf, head="lm").items()}
    ignored = ignored_tensors(hf, head="lm")
    return _wrong_tensors(expected, wanted | {name: shape for name, shape in shapes.items() if name not in ignored})


def _wrong_tensors(expected: ExpectedServer, wanted: Mapping[str, tuple[int, ...]] | None) -> list[str]:
    """Return in words the tensors whose name or shape is wrong.

    wanted: shapes of the server's model; None where its checkpoint cannot be read: the trainer's config gives them.
    """
    if wanted is None:
        wanted = {name: tensor.shape for name, tensor in hf_tensors(expected.hf, head="lm").items()}
    shapes = [(name, expected.sent.get(name), wanted.get(name)) for name in {**expected.sent, **wanted}]
    return [
        f"{name} would be sent as {list(own or ())}, its model has {list(theirs or ())}"
        for name, own, theirs in shapes
        if own is None or theirs is None or tuple(own) != tuple(theirs)
    ]


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
    adapter: str = ""  # the name in `Sampling.adapter`

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
            "extra_key": uuid.uuid4().hex,  # no cached prefix, which may be of older weights
            **({"lora_path": self.adapter} if self.adapter else {}),
        }
        answer = control.object("POST", "/generate", body)
        try:
            pairs = [(float(entry[0]), int(entry[1])) for entry in answer["meta_info"]["output_token_logprobs"]]
            tokens = [int(token) for token in answer["output_ids"]]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            what = f"no answer to a probe: {type(error).__name__}: {error}"
            raise ServerError(control.endpoint, "/generate", what) from None
        good = all(0 <= token < self.vocab_size and math.isfinite(logprob) for logprob, token in pairs)
        if not good or tokens != [token for _, token in pairs] or len(tokens) != self.num_tokens:
            what = f"no answer to a probe: {tokens} with {pairs}; {self.num_tokens} were asked for"
            raise ServerError(control.endpoint, "/generate", what)
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
