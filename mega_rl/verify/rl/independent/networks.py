"""Transformers' models as policy and critic, and their updates by AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from mega_rl.verify.rl.independent import formulas
from mega_rl.verify.rl.independent.formulas import UNSAID
from mega_rl.verify.rl.independent.records import Figures, LockstepSettings, ScoredSample

VALUE_HEAD = "score.weight"


class Network:
    """A model of transformers in float32, with the parameters that train, by its names for them."""

    def __init__(self, path: Path) -> None:
        disable_progress_bar()
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False, local_files_only=True
        )
        self._model = model.eval()
        self.parameters: Mapping[str, nn.Parameter] = dict(self._model.named_parameters())
        self._on_disk: set[str] = set()
        for file in path.glob("*.safetensors"):
            with safe_open(file, framework="pt") as stored:
                self._on_disk |= set(stored.keys())

    def on_disk(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return tensors under the names of the checkpoint, which splits experts that transformers joins."""
        if set(tensors) <= self._on_disk | {VALUE_HEAD}:
            return tensors
        with TemporaryDirectory(prefix="names_") as folder:
            self._model.save_pretrained(folder, state_dict=dict(tensors))
            return {
                name: tensor for file in Path(folder).glob("*.safetensors") for name, tensor in load_file(file).items()
            }

    def weights(self) -> Mapping[str, Tensor]:
        """Return copies of the weights of now, by Hugging Face name."""
        return self.on_disk({name: parameter.detach().clone() for name, parameter in self.parameters.items()})


def of_response(logits: Tensor, sample: ScoredSample, temperature: float) -> tuple[Tensor, Tensor]:
    """Return (log-prob, entropy) of each response token, [n]; logits: [n, V]."""
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    response = torch.tensor(sample.sampled)
    return logprobs[torch.arange(len(response)), response], -(logprobs.exp() * logprobs).sum(-1)


def before_tokens(sample: ScoredSample, outputs: Iterable[Tensor]) -> Tensor:
    """Return the outputs at the position before each token, [n, ...] float64; outputs: of each row."""
    rows = zip(outputs, sample.rows, strict=True)
    return torch.cat([output[[place - 1 for place in row.places]] for output, row in rows]).double()


class PolicyNetwork(Network):
    """A language model that never says a token which its tokenizer does not know, nor padding."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        tokenizer, config = AutoTokenizer.from_pretrained(path, local_files_only=True), self._model.config
        names = [tokenizer.convert_ids_to_tokens(token) for token in range(config.vocab_size)]
        self._unsaid = [i for i, name in enumerate(names) if name is None or i == tokenizer.pad_token_id]

    def logits(self, sample: ScoredSample) -> Tensor:
        """Return the logits that predict each response token, [n, V] float64."""
        read = (self._model(torch.tensor([row.tokens[:-1]]), use_cache=False).logits[0] for row in sample.rows)
        logits = before_tokens(sample, read)
        return logits.index_fill(1, torch.tensor(self._unsaid, dtype=torch.int64), UNSAID)

    def logprobs(self, sample: ScoredSample, temperature: float) -> Tensor:
        """Return the log-prob of each response token, [n] float64."""
        return of_response(self.logits(sample), sample, temperature)[0]


@torch.no_grad()
def moved(reference: Network, policy: Network, rate: float) -> None:
    """Move the reference's weights towards the policy's by share `rate` (TR-DPO, arXiv:2404.09656, eq. 2)."""
    for name, parameter in reference.parameters.items():
        mixed = (1 - rate) * parameter.double() + rate * policy.parameters[name].double()
        parameter.copy_(mixed)


class CriticNetwork(Network):
    """A language model's backbone, with a head of one value that begins at 0."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._backbone = self._model.base_model
        kept = {id(parameter) for parameter in self._backbone.parameters()}
        named = {name: parameter for name, parameter in self.parameters.items() if id(parameter) in kept}
        self._head = nn.Parameter(torch.zeros(1, self._model.config.hidden_size))
        self.parameters = {**named, VALUE_HEAD: self._head}

    def values(self, sample: ScoredSample) -> Tensor:
        """Return the value before each response token, [n] float64."""
        run = self._backbone
        read = (run(torch.tensor([row.tokens[:-1]]), use_cache=False).last_hidden_state[0] for row in sample.rows)
        return (before_tokens(sample, read) @ self._head[0].double()).flatten()


class TrainedNetwork:
    """A network with AdamW (arXiv:1711.05101) and gradient clipping; moments in float64, weights in float32."""

    def __init__(self, role: str, network: Network, settings: LockstepSettings) -> None:
        self._role, self._network, self._settings = role, network, settings
        self._first, self._second = (
            {name: torch.zeros_like(p, dtype=torch.float64) for name, p in network.parameters.items()} for _ in range(2)
        )
        self._steps = 0

    def update(
        self,
        samples: Sequence[ScoredSample],
        terms: Callable[[int], Tensor],
        *,
        lr: float,
        place: tuple[int, int],
        tokens: Mapping[str, list[Tensor]],
    ) -> Figures:
        """Make an optimizer step on the sum of `terms` (of sample i, by token) over `samples`.

        place: (step, mini-batch), for the figures; tokens: figures of each sample's tokens.
        """
        parameters = self._network.parameters
        for parameter in parameters.values():
            parameter.grad = None
        loss, scale = 0.0, 0.0
        for i in range(len(samples)):
            term = terms(i)
            term.sum().backward()
            loss, scale = loss + float(term.sum().detach()), scale + float(term.detach().abs().sum())
        gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad.detach() for name, p in parameters.items()}
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
        for gradient in gradients.values():
            gradient.mul_(formulas.clip_factor(norm, self._settings.clip_grad))
        if samples:  # no optimizer step for a mini-batch without a token to learn from
            self._step(lr, gradients)
        return Figures(
            self._role,
            *place,
            tokens={name: torch.cat([torch.zeros(0), *rows]).double() for name, rows in tokens.items()},
            loss=loss,
            loss_scale=scale,
            grad_norm=norm,
            gradients=self._network.on_disk({name: gradient.clone() for name, gradient in gradients.items()}),
            weights=self._network.weights(),
        )

    @torch.no_grad()
    def _step(self, lr: float, gradients: Mapping[str, Tensor]) -> None:
        """Move the weights by their gradients."""
        settings = self._settings
        self._steps += 1
        first_below, second_below = formulas.bias_corrections(self._steps, settings)
        for name, parameter in self._network.parameters.items():
            gradient, first, second = gradients[name].double(), self._first[name], self._second[name]
            first.mul_(settings.beta1).add_((1 - settings.beta1) * gradient)
            second.mul_(settings.beta2).add_((1 - settings.beta2) * gradient**2)
            direction = (first / first_below) / ((second / second_below).sqrt() + settings.eps)
            decayed = parameter.flatten() if name.endswith("bias") else parameter  # experts' biases are stacked
            weight = parameter.double() * (1 - lr * formulas.decay(decayed, settings))
            parameter.copy_(weight - lr * direction)
