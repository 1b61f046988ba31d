"""Muon: the momentum of whole matrices, each orthogonalised on one rank that shares it.

A rank holds rectangles of matrices: of Megatron-Core's joined parameters after all cuts, or rows under FSDP2. In a step
a matrix's momentum travels to one rank, torch's Newton-Schulz runs there, and its result travels back. Both travel in
bf16, in which torch's Newton-Schulz works, so nothing is lost: equal gradients give equal bits on any layout.

Sources: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; weight decay, and the scale that lets Adam's
learning rate hold: Liu et al. 2025, arXiv:2502.16982.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim import _muon as upstream

from mega_rl.converters.live.load import weights_of
from mega_rl.converters.plan.matrices import Tile, matrices, tiles_of
from mega_rl.converters.plan.parameters import disk_tensors
from mega_rl.converters.plan.ranks import build_plan
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.converters.safetensors.header import matrix_shape
from mega_rl.data.minibatches import partition_balanced
from mega_rl.ddp.access import local, rows_here, unwrapped
from mega_rl.ddp.optimizer import parts, stepped_parameters
from mega_rl.errors import UserError
from mega_rl.parallel.boxes import flat_boxes
from mega_rl.parallel.comm import GroupRanks
from mega_rl.parallel.groups import Groups
from mega_rl.parallel.layout import RankCoordinates

Sizes = list[int]  # elements by rank
MOMENTUM = 0.95  # Jordan et al. 2024; torch's own default
ROUND = 1 << 26  # elements per rank that travel at a time, about
SETTINGS = (upstream.DEFAULT_A, upstream.DEFAULT_B, upstream.DEFAULT_C), upstream.DEFAULT_NS_STEPS, upstream.EPS


class Panel(NamedTuple):
    """A rectangle of a matrix in this rank's memory."""

    tile: Tile  # only its place in the matrix
    parameter: Tensor  # the one that the optimizer steps
    start: int  # elements before the rectangle in this rank's part of the parameter
    strides: tuple[int, int]

    def of(self, tensor: Tensor | None) -> Tensor:
        """Return the rectangle of the parameter, its gradient or its momentum, [rows, cols], a view."""
        assert tensor is not None
        memory = local(tensor)
        return memory.as_strided(self.tile[3:5], self.strides, memory.storage_offset() + self.start)


class Muon:
    """Steps of the matrices among the parameters of `optimizers`, whose AdamW steps all others.

    A matrix has one moment, "exp_avg". Each pipeline rank works out its own matrices; collective over the world.

    Raises UserError: no matrix trains.
    """

    def __init__(
        self, optimizers: Iterable[Optimizer], panels: list[Panel], sharding: Sharding, groups: Groups
    ) -> None:
        self._shapes = matrices(sharding.hf, sharding.head)[0]
        self._ranks = GroupRanks(groups.collection.tp_dp_cp)
        held = torch.zeros(len(self._shapes), dtype=torch.float64)
        for panel in panels:
            held[panel.tile.matrix] += panel.tile.numel / self._ranks.size
        if not GroupRanks(groups.world).max(torch.tensor(len(panels))):
            raise UserError("optim.name=muon: no weight that trains is a matrix inside a layer; set optim.name=adam")
        self._members: dict[Tensor, tuple[dict[str, Tensor], dict[str, Any]]] = {}  # parameter -> state, settings
        for optimizer in optimizers:
            for settings in optimizer.param_groups:
                for parameter in {panel.parameter for panel in panels}.intersection(settings["params"]):
                    optimizer.state[parameter] = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(parameter)}
                    self._members[parameter] = optimizer.state[parameter], settings
        homes = _homes(self._shapes, self._ranks.sum(held).tolist(), ranks=self._ranks.size)
        self._rounds = [self._agree(panels, home) for home in homes]

    def _agree(self, panels: list[Panel], homes: Mapping[int, int]) -> tuple[list[Panel], Sizes, list[Tile], Sizes]:
        """Return this rank's panels of some matrices and the rectangles that come; collective; homes: ranks.

        Both are in the order of the other ranks, and each is followed by its elements by rank.
        """
        panels = sorted((p for p in panels if p.tile.matrix in homes), key=lambda p: homes[p.tile.matrix])
        counts, sent = [0] * self._ranks.size, [0] * self._ranks.size
        for panel in panels:
            counts[homes[panel.tile.matrix]] += 1
            sent[homes[panel.tile.matrix]] += panel.tile.numel
        table = torch.tensor([panel.tile[:5] for panel in panels], dtype=torch.int64).view(-1, 5)
        tiles = [Tile(*row) for row in self._ranks.send(table, counts, self._ranks.exchange_counts(counts)).tolist()]
        return panels, sent, tiles, self._ranks.exchange_counts(sent)

    @torch.no_grad()
    def step(self) -> None:
        """Update the matrices by their gradients, which it takes away: AdamW skips a parameter without one."""
        for parameter, (state, settings) in self._members.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            state["step"] += 1
            local(state["exp_avg"]).lerp_(local(parameter.grad), 1 - MOMENTUM)
            local(parameter).mul_(1 - settings["lr"] * settings["weight_decay"])
        for each in self._rounds:
            self._update(*each)
        for parameter in self._members:
            parameter.grad = None

    def _update(self, panels: list[Panel], sent: Sizes, tiles: list[Tile], received: Sizes) -> None:
        """Add the updates of a round's matrices to this rank's panels."""
        sizes = [panel.tile.numel for panel in panels]
        momentum = torch.empty(sum(sent), dtype=torch.bfloat16, device=self._ranks.device)
        for panel, part in zip(panels, momentum.split(sizes), strict=True):
            average = panel.of(self._members[panel.parameter][0]["exp_avg"])
            part.copy_(panel.of(panel.parameter.grad).lerp(average, MOMENTUM).flatten())  # Nesterov's
        arrived = self._ranks.send(momentum, sent, received)
        whole = {w.matrix: arrived.new_full(self._shapes[w.matrix], torch.nan) for w in tiles}  # a gap would show
        places = [whole[w.matrix][w.row : w.row + w.rows, w.col : w.col + w.cols] for w in tiles]
        for place, part in zip(places, arrived.split([w.numel for w in tiles]), strict=True):
            place.copy_(part.view(place.shape))
        for matrix in whole.values():
            matrix.copy_(upstream._zeropower_via_newtonschulz(matrix, *SETTINGS))
        update = self._ranks.send(torch.cat([arrived[:0], *(place.flatten() for place in places)]), received, sent)
        for panel, part in zip(panels, update.split(sizes), strict=True):
            target, shape = panel.of(panel.parameter), torch.Size(self._shapes[panel.tile.matrix])
            lr = upstream._adjust_lr(self._members[panel.parameter][1]["lr"], "match_rms_adamw", shape)
            target.add_(part.view(target.shape).to(target.device), alpha=-lr)


def _homes(shapes: Sequence[tuple[int, ...]], held: Sequence[float], *, ranks: int) -> Iterator[dict[int, int]]:
    """Yield the rank of each matrix of a round, with about equal work for all ranks.

    held: elements of each matrix on a rank, on average; none of one that does not train.
    """
    rounds = [int(end // ROUND) for end in accumulate(held)]
    for _, some in groupby((m for m, elements in enumerate(held) if elements), key=rounds.__getitem__):
        members = list(some)
        work = [shapes[matrix][0] * shapes[matrix][1] * min(shapes[matrix]) for matrix in members]
        chosen = partition_balanced(work, ranks, equal_counts=False)
        yield {members[i]: rank for rank, mine in enumerate(chosen) for i in mine}


def _panels(stepped: Tensor, tiles: Iterable[Tile], shape: torch.Size, first: int = 0) -> Iterator[Panel]:
    """Yield a rank's part of a parameter's tiles: rows, or elements from `first` on."""
    width = matrix_shape(tuple(shape))[1]
    if isinstance(stepped, DTensor):
        first = rows_here(stepped).offset[0] * shape[1:].numel()
    for w in tiles:
        # The tile as lines of the tensor: of its elements in the order of memory a rank holds consecutive ones.
        row, col, lines, wide = (w.col, w.row, w.cols, w.rows) if w.transposed else w[1:5]
        start, before = w.top * width + w.left - first, []
        for end in (0, local(stepped).numel()):
            line, rest = divmod(end - start, width)
            before.append(min(max(line * wide + min(-(-rest // w.step), wide), 0), lines * wide))
        for (down, along), (tall, broad) in flat_boxes((lines, wide), *before):
            place, strides = (row + down, col + along, tall, broad), (width, w.step)
            if w.transposed:
                place, strides = (place[1], place[0], broad, tall), (w.step, width)
            yield Panel(Tile(w.matrix, *place), stepped, start + down * width + along * w.step, strides)


def panels_of_chunks(
    chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer, sharding: Sharding, at: RankCoordinates
) -> Iterator[Panel]:
    """Yield a rank's part of the matrices that a Megatron-Core optimizer steps."""
    tiles: dict[int, list[Tile]] = {}  # keys: ids of parameters
    for vp_stage, chunk in enumerate(chunks):
        live, on_disk = weights_of(unwrapped(chunk)), matrices(sharding.hf, sharding.head)[1]
        for plan in build_plan(sharding, at, vp_stage=vp_stage):
            tiles[id(live[plan.name])] = list(tiles_of(plan.copies, on_disk))
    for part in parts(optimizer):
        for parameter, first, stepped in stepped_parameters(part) if part.optimizer is not None else ():
            yield from _panels(stepped, tiles[id(parameter)], parameter.shape, first)


def panels_of_rows(parameters: Mapping[str, DTensor], sharding: Sharding) -> Iterator[Panel]:
    """Yield a rank's part of the matrices of a transformers model that train."""
    hf, on_disk = sharding.hf, matrices(sharding.hf, sharding.head)[1]
    for name, parameter in parameters.items():
        disk = disk_tensors(hf.family, name, tuple(parameter.shape), hf.own) if parameter.requires_grad else ()
        tiles = [w._replace(top=w.top + tensor.row) for tensor in disk for w in on_disk.get(tensor.name, ())]
        yield from _panels(parameter, tiles, parameter.shape)
