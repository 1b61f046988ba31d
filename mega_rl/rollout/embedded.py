"""Embedded rollouts: a Hugging Face model in the trainer's process, and its weight sync."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
import xxhash
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from mega_rl.agents.environment import Answer, TurnQueue, TurnRequest, TurnSampling, in_batches
from mega_rl.agents.trajectory import Turn, response_rows
from mega_rl.converters.architecture import Adapter
from mega_rl.converters.hf.config import needs_proof
from mega_rl.converters.hf.untabled import UNLIMITED_POSITIONS
from mega_rl.converters.live.load import model_config, weights_on_disk
from mega_rl.converters.plan.adapters import WEIGHT, A, B
from mega_rl.engines.models.adapters import LinearAdapter
from mega_rl.engines.models.norms import fuse_norms
from mega_rl.rollout.continuous import KeptCaches, KeysOf, RunningBatch, answer_turns, check_finite
from mega_rl.rollout.decoding import ATTENTION, Draw, Way, decode, has_full_attention, prove_decoding
from mega_rl.rollout.sampling import Sampler, check_positions, is_greedy, response_limit, turn_keys, uniform_at
from mega_rl.rollout.sglang.generation.engine import NUMBER_BITS
from mega_rl.rollout.sglang.generation.router import Answered
from mega_rl.rollout.sglang.generation.samples import GenerationResult, Sample, SampleRequest, State
from mega_rl.rollout.tokens import with_end_of_sequence
from mega_rl.tracking import progress
from mega_rl.types import Draws, IdRanges, Metrics, Prompt, Rollout

logger = logging.getLogger(__name__)


class HFRolloutEngine:
    """Rollout engine over a Hugging Face model that holds its own copy of the policy's weights.

    It builds the model from config.json only; every weight comes through `load_weights`.
    """

    routed: None = None  # responses do not report the experts of their tokens

    def __init__(
        self,
        model_path: str | Path,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        sampler: Sampler,
        max_new_tokens: int,
        stop_token_ids: Sequence[int],
        batch_size: int,
        hidden_tokens: IdRanges = (),
        shares: HFRolloutEngine | None = None,
    ) -> None:
        """shares: an engine of this checkpoint and device, whose model of the dtype is used.

        Raises UserError for a directory without a config.json that transformers knows.
        """
        self._sampler, self._device = sampler, torch.device(device)
        self._max_new_tokens, self._batch_size, self._hidden_tokens = max_new_tokens, batch_size, hidden_tokens
        config = model_config(Path(model_path))
        # Weights stay unset; buffers are true, since rotary frequencies are computed from the config.
        way = Way(ATTENTION, True)
        if needs_proof(config.to_dict()):
            way = prove_decoding(config, self._device)
            if not way.left_padded:
                logger.info(
                    "padding would enter model_type=%s: prompts of one length decode together", config.model_type
                )
        self._left_padded = way.left_padded
        model = shares.model if shares is not None and shares.model.dtype == dtype else None
        if model is None:
            with no_init_weights(), self._device:
                model = AutoModelForCausalLM.from_config(
                    config, dtype=dtype, attn_implementation=way.attention, trust_remote_code=False
                )
            model.tie_weights()
            fuse_norms(model)
        self.model: PreTrainedModel = model.eval().requires_grad_(False)
        self.max_positions: int = getattr(config, "max_position_embeddings", None) or UNLIMITED_POSITIONS
        stop_ids = with_end_of_sequence(Path(model_path), config, stop_token_ids)
        self._stop_token_ids = torch.tensor(stop_ids, dtype=torch.int64, device=self._device)
        self.weights = weights_on_disk(self.model)  # by their names in the checkpoint, as the model holds them
        self._adapters = list[str]()  # weights that come anew in each update, next to a base that stays
        if shares is not None and self.model is shares.model:
            self.weights, self._adapters = dict(shares.weights), list(shares._adapters)
        self._written: set[int] = set()
        self._weight_version: int | None = None

    # -- generation ------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt],
        prompt_index: Sequence[int],
        *,
        n: int,
        seed: tuple[int, ...],
        greedy: bool = False,
        draws: Draws | None = None,
    ) -> Rollout:
        """Return n samples of each prompt, rows ordered by prompt then sample; see `protocols.RolloutEngine`.

        prompt_index: [number of prompts], enters the random stream of each sample and the result. Responses hold their
        stop token, on the loss mask. Raises UserError for prompts that are empty or leave no room for a response in the
        model's context, RuntimeError before the first weights, RunError when logits are not finite.
        """
        if self._weight_version is None:
            raise RuntimeError("generate was called before any weights were published to the rollout engine")
        limit = response_limit(prompts, draws, max_new_tokens=self._max_new_tokens, max_positions=self.max_positions)
        requests = [
            TurnRequest(tuple(prompt.token_ids), (index, sample, 0), limit)
            for prompt, index in zip(prompts, prompt_index, strict=True)
            for sample in range(n)
        ]
        turns = self._turns(requests, *self._drawing(TurnSampling(seed, greedy, draws)))
        responses = [(one.token_ids, one.key[:2], turn) for one, turn in zip(requests, turns, strict=True)]
        return response_rows(responses, version=self._weight_version)

    def turns(self, asked: TurnQueue, how: TurnSampling) -> None:
        """Answer turns in a running batch, or in batches where the layers need it."""
        keys, draw = self._drawing(how)
        if not has_full_attention(self.model.config):
            in_batches(asked, partial(self._turns, keys=keys, draw=draw))
            return
        # The caches end with this call, and so before the weights change.
        kept = KeptCaches(self._batch_size)
        batch = RunningBatch(
            self.model, draw, stop_token_ids=self._stop_token_ids, kept=kept, hidden=self._hidden_tokens
        )
        answer_turns(asked, batch, keys=keys, batch_size=self._batch_size)

    def _drawing(self, how: TurnSampling) -> tuple[KeysOf, Draw]:
        """Return the random streams of turns, and the draw of their tokens."""
        own, draws = self._sampler, how.draws
        sampler = own if draws is None else Sampler(draws.temperature, draws.top_p, draws.top_k)

        def keys(requests: Sequence[TurnRequest]) -> Tensor:
            for one in requests:
                check_positions(len(one.token_ids), one.limit, max_positions=self.max_positions)
            return turn_keys(how.seed, *torch.tensor([one.key for one in requests], device=self._device).unbind(dim=1))

        def draw(logits: Tensor, keys: Tensor, positions: Tensor | int) -> tuple[Tensor, Tensor]:
            if is_greedy(how.greedy, draws):
                return own.most_likely(logits)
            return sampler.draw(logits, uniform_at(keys, positions))

        return keys, draw

    def _turns(self, requests: Sequence[TurnRequest], keys: KeysOf, draw: Draw) -> list[Turn]:
        """Return a turn for each request; the samples of a prompt read it once."""
        turns = dict[int, Turn]()
        for batch in self._batches([len(one.token_ids) for one in requests]):
            own = [requests[place] for place in batch]
            names = [(one.key[0], one.token_ids) for one in own]
            place_of = {name: place for place, name in enumerate(dict.fromkeys(names))}
            limits = torch.tensor([one.limit for one in own], device=self._device)
            decoded = decode(
                self.model,
                [token_ids for _, token_ids in place_of],
                torch.tensor([place_of[name] for name in names], device=self._device),
                keys(own),
                draw=draw,
                max_new_tokens=int(limits.max()),
                stop_token_ids=self._stop_token_ids,
                hidden=self._hidden_tokens,
            )
            stopped = decoded.finished & (decoded.lengths <= limits)
            columns = (decoded.tokens, decoded.logprobs, decoded.lengths.minimum(limits), stopped)
            for place, ids, logprobs, end, stops in zip(batch, *(one.tolist() for one in columns), strict=True):
                check_finite(requests[place], logprobs[:end])
                turns[place] = Turn(tuple(ids[:end]), tuple(logprobs[:end]), (), stops)
        return [turns[place] for place in range(len(requests))]

    def settle(self, lost: Callable[[], int], again: Callable[[], None]) -> None:
        """Do nothing: this engine loses no turns."""

    def metrics(self) -> Metrics:
        """Return nothing: the trainer's own phases time this engine."""
        return {}

    def _batches(self, lengths: Sequence[int]) -> Iterator[Sequence[int]]:
        """Yield places of contexts that decode together, neighbours of like length: little is padded."""
        order, done = sorted(range(len(lengths)), key=lengths.__getitem__), 0
        runs = [order] if self._left_padded else [list(run) for _, run in groupby(order, key=lengths.__getitem__)]
        for run in runs:
            for first in range(0, len(run), self._batch_size):
                batch = run[first : first + self._batch_size]
                progress.report(done, len(lengths), unit="rows")
                yield batch
                done += len(batch)

    # -- weights ---------------------------------------------------------------------------------------------------

    def adapt(self, adapter: Adapter) -> bool:
        """Give targeted layers adapters, which updates then hold apart from a base that comes once.

        Returns whether it did: a target that is not a linear layer in transformers, as experts, has none.
        """
        if self._adapters:  # those of an engine that shares the model
            return True
        linear = {one.weight.data_ptr(): one for one in self.model.modules() if isinstance(one, nn.Linear)}
        layers = {}
        for name, weight in self.weights.items():
            module, layer = name.removesuffix(WEIGHT), linear.get(weight.data_ptr())
            if name.endswith(WEIGHT) and module.rpartition(".")[2] in adapter.targets:
                if layer is None or layer.weight.shape != weight.shape:
                    return False
                layers[module] = layer
        for module, layer in layers.items():
            layer.adapter = LinearAdapter(layer, adapter).to(layer.weight).requires_grad_(False)
            self.weights |= {module + A: layer.adapter.a, module + B: layer.adapter.b}
            self._adapters += [module + A, module + B]
        return True

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Overwrite the named weights: full tensors, Hugging Face names and shapes.

        Raises ValueError that lists every unknown name and every wrong shape of them; then nothing is written.
        """
        named = list(weights)
        problems = []
        for name, tensor in named:
            if name not in self.weights:
                problems.append(f"{name}: the model has no such weight")
            elif self.weights[name].shape != tensor.shape:
                problems.append(f"{name}: shape {list(tensor.shape)}, the model's is {list(self.weights[name].shape)}")
        if problems:
            raise ValueError("the rollout model cannot take these weights:\n" + "\n".join(problems))
        for name, tensor in named:
            self.weights[name].copy_(tensor)
            self._written.add(self.weights[name].data_ptr())

    def checksums(self, names: Iterable[str]) -> dict[str, str]:
        """Return each named weight's checksum as the model holds it; KeyError for an unknown name."""
        return {name: checksum(self.weights[name], self.weights[name].dtype) for name in names}

    def finish_update(self, version: int) -> None:
        """Let later rollouts carry `version`. Raises RuntimeError naming weights not written since the last call."""
        missing = [name for name, tensor in self.weights.items() if tensor.data_ptr() not in self._written]
        if missing:
            raise RuntimeError(f"weights not written by the update to version {version}: {', '.join(missing)}")
        self._written -= {self.weights[name].data_ptr() for name in self._adapters or self.weights}
        self._weight_version = version


@dataclass
class EmbeddedRounds:
    """Router of an engine in this process: what is asked waits for `sample`, in whose thread answers come.

    A request's random numbers depend on the seed, its key and the tokens that it has, so that a response which
    continues takes none again.
    """

    turns: Callable[[TurnQueue, TurnSampling], None]  # the engine's
    seed: int
    _version: int = field(default=0, init=False)
    _asked: TurnQueue = field(default_factory=TurnQueue, init=False)

    def open(self, *_: object, version: int, **__: object) -> None:
        """Begin a round with the weights of `version`."""
        self._version = version

    def ask(self, request: SampleRequest, answer: Answered, so_far: Sample | None = None) -> Callable[[], object]:
        """Ask for the rest of a response, of which the round samples up to its limit."""
        before = so_far or Sample()
        have, (sample, turn) = len(before.token_ids), divmod(request.key[1], 1 << NUMBER_BITS)
        assert request.limit is not None
        key = (request.key[0], sample, turn | have << NUMBER_BITS)
        rest = self._asked.put(TurnRequest((*request.prompt, *before.token_ids), key, request.limit - have))
        version = self._version

        def answered(rest: Future[Answer]) -> None:
            if not rest.cancelled() and isinstance(got := rest.result(), Turn):
                versions = [*before.versions, *(version for _ in got.token_ids)]
                ids, logprobs = [*before.token_ids, *got.token_ids], [*before.logprobs, *got.logprobs]
                answer(Sample(ids, logprobs, versions, "stop" if got.stopped else "length"))

        rest.add_done_callback(answered)
        return rest.cancel

    def sample(self, is_over: Callable[[], bool]) -> None:
        """Answer requests until the round is over; no collective."""
        self._asked.is_alive = lambda: not is_over()
        self.turns(self._asked, TurnSampling((self.seed,)))

    def result(self, *, interrupt: bool = False) -> GenerationResult:
        """Return nothing: all answers came by `ask`."""
        return GenerationResult()

    taken = result

    def states(self) -> dict[int, tuple[State, str]]:
        """Return nothing: there are no servers."""
        return {}


def checksum(tensor: Tensor, dtype: torch.dtype) -> str:
    """ "float32[4, 8]:<16 hex digits>" of a tensor after the cast to `dtype`.

    The digits are xxh3_64 over type, shape and the contiguous bytes, so that a transposed square matrix differs from
    its original and the same bits in another type differ too.
    """
    data = tensor.detach().to(device="cpu", dtype=dtype)
    header = f"{str(dtype).removeprefix('torch.')}{list(data.shape)}"
    digest = xxhash.xxh3_64(header.encode())
    digest.update(data.reshape(-1).view(torch.uint8).numpy().data)
    return f"{header}:{digest.hexdigest()}"


class EmbeddedWeightSync:
    """`protocols.WeightSync` for an engine object in this process.

    `export` is called once per publish and yields (Hugging Face name, full tensor); a tensor must stay unchanged until
    the next one. On a publish that verifies, the sender's tensor in the receiver's dtype and the receiver's tensor
    after the last one must have one checksum. `export_adapters`: of an engine that has adapters, what every publish
    but the first sends.
    """

    def __init__(
        self,
        export: Callable[[], Iterator[tuple[str, Tensor]]],
        engine: HFRolloutEngine,
        *,
        verify_interval: int,
        export_adapters: Callable[[], Iterator[tuple[str, Tensor]]] | None = None,
    ) -> None:
        self._export, self._export_adapters, self._engine = export, export_adapters or export, engine
        self._verify_interval = verify_interval
        self._num_publishes = 0
        self._num_bytes = 0  # in the last publish
        self.weight_version = 0  # version of the weights that the engine holds; 0 before the first publish

    def resume_at(self, version: int) -> None:
        """Let the next publish stamp `version`, so that a resumed run counts on."""
        self.weight_version = version - 1

    def resend(self) -> None:
        """Send the weights of the current version again, where another sync has overwritten them."""
        if self._num_publishes:
            for weight in self._export_adapters():
                self._engine.load_weights([weight])
            self._engine.finish_update(self.weight_version)

    def publish(self) -> Metrics:
        """Send the weights, verify when due, raise the version; returns metrics.

        Raises RuntimeError naming the weights that arrived damaged or never arrived; the version then stays.
        """
        verify = self._num_publishes % self._verify_interval == 0
        sent: dict[str, str] = {}
        num_bytes = num_tensors = 0
        export = self._export_adapters if self._num_publishes else self._export
        for name, tensor in export():
            self._engine.load_weights([(name, tensor)])
            num_bytes += tensor.nbytes
            num_tensors += 1
            progress.report(num_bytes, self._num_bytes or None, unit="B")
            if verify:
                sent[name] = checksum(tensor, self._engine.weights[name].dtype)
        if verify:
            self._compare(sent)
        self._engine.finish_update(self.weight_version + 1)
        self.weight_version += 1
        self._num_publishes += 1
        self._num_bytes = num_bytes
        return {
            "rollout/weight_version": float(self.weight_version),
            "sync/bytes": float(num_bytes),
            "sync/tensors": float(num_tensors),
            "sync/verified": float(verify),
        }

    def _compare(self, sent: dict[str, str]) -> None:
        """Raise for the weights whose sum at the receiver differs from the sender's."""
        received = self._engine.checksums(sent)
        damaged = [
            f"{name}: sent {total}, received {received[name]}"
            for name, total in sent.items()
            if received[name] != total
        ]
        if damaged:
            raise RuntimeError(
                f"{len(damaged)} of {len(sent)} weights arrived damaged in the update to version "
                f"{self.weight_version + 1}:\n" + "\n".join(damaged)
            )
