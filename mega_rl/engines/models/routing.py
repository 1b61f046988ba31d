"""Routers of an engine: announcing a batch's tokens, replaying and recording choices, load statistics."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

from mega_rl.config.schema import MoeConfig
from mega_rl.converters.architecture import HFConfig
from mega_rl.data.packing import MicroBatch, token_places
from mega_rl.engines.models.moe import Expecting, RoutedTokens, Router
from mega_rl.errors import RunError, UserError
from mega_rl.parallel.accelerator.base import send
from mega_rl.parallel.comm import ranks_of
from mega_rl.parallel.groups import Groups
from mega_rl.types import Experience, Metrics, Rollout

LONGEST = torch.iinfo(torch.int16).max


class Routing:
    """The routers of this rank's model chunks during one pass over a batch after the other.

    `begin` starts a pass, `expect` precedes each forward of a chunk, and `finish_forward` or `finish_training` ends it.
    Layers are counted among the model's mixtures, multi-token prediction left out. With `record`, forwards keep the
    experts they chose, and every pass replays what its batch brings as `routing`. Behind the mixtures come as many rows
    of `top_k` numbers for each indexer as hold the positions of the tokens that it chose.
    """

    def __init__(
        self, models: Sequence[torch.nn.Module], hf: HFConfig, *, settings: MoeConfig, record: bool, groups: Groups
    ) -> None:
        moe, indexer = hf.moe, None if hf.mla is None else hf.mla.indexer
        assert moe is not None
        if settings.expert_bias_update_rate > 0.0 and not moe.expert_bias:
            raise UserError(
                f"engine.megatron.moe.expert_bias_update_rate={settings.expert_bias_update_rate}: this model's routers "
                "have no bias; set it to 0"
            )
        self.moe, self.record = moe, record
        self.balance_coef, self.bias_rate = settings.aux_loss_coef, settings.expert_bias_update_rate
        self.num_mixtures = sum(moe.layers)
        self._rows = 0 if indexer is None or not record else -(-indexer.top_k // moe.top_k)  # of an indexer
        self.num_rows = self.num_mixtures + hf.num_layers * self._rows
        self._tp = groups.coordinates.tp_rank, groups.layout.tp if groups.layout.sequence_parallel else 1
        self._replica, self._world = ranks_of(groups.host_replica), ranks_of(groups.world)
        self._shares = groups.layout.dp * groups.layout.cp
        numbers = list(accumulate(int(mixed) for mixed in moe.layers))
        self.routers: list[list[Router]] = []
        self._attentions: list[list[Expecting]] = []  # those with an indexer, if their choices are recorded
        for model in models:
            layers = [layer.self_attention.core_attention for layer in model.decoder.layers] if self._rows else []  # type: ignore[union-attr]
            for attention in layers:
                attention.number = self.num_mixtures + (attention.layer_number - 1) * self._rows  # its first row
            self._attentions.append(layers)
            routers = [module for module in model.decoder.modules() if isinstance(module, Router)]  # type: ignore[union-attr]
            for router in routers:
                router.number = numbers[router.layer_number - 1] - 1
            self.routers.append(routers)
        modules = [module for model in models for module in model.modules()]
        self._dispatchers = [module.token_dispatcher for module in modules if hasattr(module, "token_dispatcher")]
        self.loads = torch.zeros(0)  # [mixtures, experts] float64 of the last training pass, over all ranks

    def begin(
        self,
        micros: Sequence[MicroBatch],
        batch: Rollout | Experience,
        *,
        training: bool,
        sequences: int = 0,
        averaged: bool = False,
    ) -> None:
        """Begin a pass over the micro-batches of a batch, on the host.

        `sequences` counts the rows of the mini-batch on all data-parallel ranks. `averaged`: gradients will be divided
        by the number of ranks that share the tokens.

        Raises RunError: its `routing` names experts that the model lacks, or has not one choice per mixture and expert;
        positions are too large to be recorded.
        """
        width, routing = batch.tokens.size(1), batch.routing
        if self._rows and width > LONGEST:
            raise RunError(f"choices of indexers are recorded up to {LONGEST} tokens, a row here may have {width}")
        self._micros, self._width, self._training = micros, width, training
        self._routing = None if routing is None or not self.record else routing.flatten(0, 1)
        if self._routing is not None:
            self._check(self._routing)
        self._scale = self._shares if averaged else 1
        self._weight = self.balance_coef / max(sequences, 1) * self._scale if training else 0.0
        self._done = [0] * len(self.routers)
        self._open: list[tuple[RoutedTokens, Tensor, Tensor] | None] = [None] * len(self.routers)
        for module in (*self._all(), *(attention for layers in self._attentions for attention in layers)):
            module.reset()
        rows = sum(len(micro.rows) for micro in micros)
        keep = self.record and not training
        self._chosen = torch.zeros(rows * width if keep else 0, self.num_rows, self.moe.top_k, dtype=torch.int16)

    def expect(self, chunk: int, device: torch.device) -> None:
        """Announce the next micro-batch to the routers of this chunk."""
        self._keep_choices(chunk)
        micro = self._micros[self._done[chunk]]
        self._done[chunk] += 1
        expecting = [*self.routers[chunk], *self._attentions[chunk]]
        if not expecting:
            return
        all_places = token_places(micro, width=self._width)
        places = all_places.view(-1)[_order(micro.tokens.shape, *self._tp)]
        tokens = self._tokens(micro, places, [router.number for router in self.routers[chunk]], device)
        for attention in self._attentions[chunk]:
            self._replay(attention.number, tokens, all_places, device)
        self._open[chunk] = (tokens, places, all_places)
        for module in expecting:
            module.expect(tokens)

    def finish_forward(self, rows: int) -> Tensor | None:
        """Return [rows, width, num_rows, top_k] int16, the choices of every real token, -1 elsewhere; collective.

        Equal on all ranks of the replica. None unless choices are recorded.
        """
        for chunk in range(len(self.routers)):
            self._keep_choices(chunk)
        self._expect_nothing()
        if not self.record:
            return None
        # Each place was filled, with the expert's number plus 1, by the one rank that has the token and the layer.
        layers = [self._replica.sum(self._chosen[:, layer].int()).short() for layer in range(self.num_rows)]
        return torch.stack(layers, dim=1).sub_(1).view(rows, self._width, self.num_rows, self.moe.top_k)

    def finish_training(self) -> Metrics:
        """Return the metrics of the mini-batch's load on experts, over all ranks and micro-batches; collective.

        `moe_load_max_over_mean` is the fullest expert's load over the mean load, averaged over layers, and
        `moe_load_max_over_mean_max` that of the worst layer; `moe_experts_without_tokens` counts over all layers.
        `moe_balance_loss` is the weighted loss that was added. No token is ever dropped.
        """
        columns = self.moe.num_experts
        table = torch.zeros(self.num_mixtures, columns + 1, dtype=torch.float64)
        for router in self._all():
            if router.loads is not None:
                table[router.number, :columns] += router.loads.cpu()
            if router.balance_loss is not None:
                table[router.number, columns] += router.balance_loss.double().cpu()
        self._expect_nothing()
        table = self._world.sum(table)
        self.loads = table[:, :columns]
        excess = self.loads.amax(1) / self.loads.mean(1).clamp(min=1e-9)
        metrics = {
            "moe_load_max_over_mean": float(excess.mean()),
            "moe_load_max_over_mean_max": float(excess.max()),
            "moe_experts_without_tokens": float((self.loads == 0).sum()),
        }
        if self.balance_coef:
            metrics["moe_balance_loss"] = float(table[:, columns].sum()) / self._scale
        return metrics

    def update_biases(self) -> None:
        """Move every router's bias by one step against the loads of `finish_training` (arXiv:2408.15664)."""
        if not self.bias_rate:
            return
        for router in self._all():
            load = self.loads[router.number]
            step = self.bias_rate * (load.mean() - load).sign()
            router.expert_bias.add_(step.to(router.expert_bias))

    def _all(self) -> list[Router]:
        return [router for routers in self.routers for router in routers]

    def _expect_nothing(self) -> None:
        """Reset the routers to upstream's behaviour, and drop the graphs of the last pass.

        Upstream's token dispatchers keep tensors of their last forward. Through the graphs of those they hold the
        model's gradient hooks, and so the whole engine, in a circle that Python's garbage collector cannot see.
        """
        for module in (*self._all(), *(attention for layers in self._attentions for attention in layers)):
            module.expect(None)
        for dispatcher in self._dispatchers:
            for name, value in vars(dispatcher).items():
                if isinstance(value, Tensor) and value.grad_fn is not None:
                    setattr(dispatcher, name, None)

    def _tokens(self, micro: MicroBatch, places: Tensor, mixtures: list[int], device: torch.device) -> RoutedTokens:
        """Return a micro-batch's tokens for a chunk's routers; places: [n] int64, their positions, -1 for padding."""
        real = places >= 0
        number = torch.zeros(max(micro.rows, default=0) + 1, dtype=torch.int64)
        number[list(micro.rows)] = torch.arange(len(micro.rows))
        row = torch.where(real, places, 0) // self._width
        replay = {}
        if self._routing is not None:
            chosen = torch.full((len(places), len(mixtures), self.moe.top_k), -1, dtype=torch.int16)
            chosen[real] = self._routing[:, mixtures][places[real]]
            chosen = send(chosen, device)
            replay = {mixture: chosen[:, i] for i, mixture in enumerate(mixtures)}
        return RoutedTokens(
            real=send(real, device),
            sequence=send(torch.where(real, number[row.clamp(max=len(number) - 1)], 0), device),
            lengths=send(torch.tensor(micro.lengths or (1,), dtype=torch.float32), device),
            training=self._training,
            balance_weight=self._weight,
            replay=replay,
            chosen={} if self.record and not self._training else None,
        )

    def _keep_choices(self, chunk: int) -> None:
        """Copy the choices of the chunk's last forward to the host."""
        if self._open[chunk] is None:
            return
        tokens, places, all_places = self._open[chunk]  # type: ignore[misc]
        self._open[chunk] = None
        real = places >= 0
        for mixture, experts in (tokens.chosen or {}).items():
            if mixture < self.num_mixtures:
                self._chosen[places[real], mixture] = experts.cpu()[real] + 1
            elif self._tp[0] == 0:  # every rank of tensor parallelism has all tokens
                chosen = _positions(experts.cpu(), all_places, self._width)[all_places >= 0]
                chosen = pad(chosen, (0, self._rows * self.moe.top_k - chosen.size(1)), value=-1)
                rows = slice(mixture, mixture + self._rows)
                self._chosen[all_places[all_places >= 0], rows] = chosen.short().unflatten(1, (self._rows, -1)) + 1

    def _replay(self, number: int, tokens: RoutedTokens, places: Tensor, device: torch.device) -> None:
        """Give an indexer's tokens the choice that the batch brings, if any; padding sees nothing."""
        if self._routing is None or self._routing.size(1) == self.num_mixtures:
            return
        chosen = self._routing[:, number : number + self._rows].flatten(1)[places.clamp(min=0)].long()
        missing = (chosen < 0) | (places < 0)[..., None]
        if missing[..., 0][places >= 0].any():
            raise RunError("routing lacks what an indexer chose for a token, though it has it for others")
        tokens.replay[number] = send(torch.where(missing, -1, chosen + _starts(places, self._width)), device)

    def _check(self, routing: Tensor) -> None:
        expected = [
            (rows, self.moe.top_k) for rows in (self.num_mixtures, self.num_rows)
        ]  # servers report experts only
        if tuple(routing.shape[1:]) not in expected:
            raise RunError(f"routing has {tuple(routing.shape[1:])} choices per token, the model {expected[-1]}")
        routing = routing[:, : self.num_mixtures]
        if routing.numel() and not -1 <= int(routing.min()) <= int(routing.max()) < self.moe.num_experts:
            raise RunError(f"routing names experts outside 0..{self.moe.num_experts - 1}")


def _positions(chosen: Tensor, places: Tensor, width: int) -> Tensor:
    """Return [b, S, k] positions in their sequences of chosen columns of a micro-batch; -1 stays."""
    return torch.where(chosen < 0, -1, chosen - _starts(places, width))


def _starts(places: Tensor, width: int) -> Tensor:
    """Return [b, S, 1] columns at which tokens' sequences begin; any number for padding."""
    return (torch.arange(places.size(1)) - places % width)[..., None]


def _order(shape: torch.Size, tp_rank: int, tp_size: int) -> Tensor:
    """Return [n] int64 flat positions of [b, S] tokens in sequence-first order, this TP rank's part."""
    rows, columns = shape
    return torch.arange(rows * columns).view(rows, columns).t().reshape(-1).chunk(tp_size)[tp_rank]
