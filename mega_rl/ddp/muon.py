"""Muon: momentum of matrices, orthogonalised; every matrix as a whole on one of the ranks that share it.

A rank holds rectangles of matrices: of Megatron-Core's joined parameters after all cuts, or rows under FSDP2. In a step
the momentum of a matrix travels to one rank, torch's Newton-Schulz runs there, and its result travels back. Both travel
in bf16, in which torch's Newton-Schulz works, so that nothing is lost: equal gradients give equal bits on any layout.

Sources: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; weight decay and the scale, by which Adam's
learning rate holds: Liu et al. 2025, arXiv:2502.16982.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim._muon import (
    DEFAULT_A,
    DEFAULT_B,
    DEFAULT_C,
    DEFAULT_NS_STEPS,
    EPS,
    _adjust_lr,
    _zeropower_via_newtonschulz,
)

from mega_rl.converters.live.load import weights_of
from mega_rl.converters.plan.matrices import Window, matrices, windows_of
from mega_rl.converters.plan.parameters import disk_tensors
from mega_rl.converters.plan.proof import tiling_faults
from mega_rl.converters.plan.ranks import build_plan
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.converters.safetensors.header import matrix_shape
from mega_rl.data.minibatches import partition_balanced
from mega_rl.ddp.access import local, rows_here, unwrapped
from mega_rl.ddp.optimizer import parts, stepped_parameters, torch_optimizers
from mega_rl.errors import UserError
from mega_rl.parallel.boxes import Box, flat_boxes
from mega_rl.parallel.comm import GroupRanks
from mega_rl.parallel.groups import Groups

ROUND = 1 << 26  # elements of a rank that travel at a time, on average over the ranks


class Place(NamedTuple):
    """A rectangle of a matrix."""

    matrix: int  # number in the model
    row: int
    col: int
    rows: int
    cols: int

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return self.rows * self.cols

    def of(self, matrix: Tensor) -> Tensor:
        """Return the rectangle as a view."""
        return matrix[self.row : self.row + self.rows, self.col : self.col + self.cols]


class Share(NamedTuple):
    """A rectangle of a matrix in this rank's memory."""

    place: Place
    parameter: Tensor  # the one that the optimizer steps
    start: int  # elements before it in this rank's part of the parameter
    strides: tuple[int, int]

    def of(self, tensor: Tensor) -> Tensor:
        """Return the rectangle of the parameter, its gradient or its momentum, [rows, cols], a view."""
        memory = local(tensor)
        return memory.as_strided(self.place[3:], self.strides, memory.storage_offset() + self.start)


class Round(NamedTuple):
    """Matrices that travel together."""

    shares: list[Share]  # this rank's, in the order of the ranks that they go to
    sent: list[int]  # elements to each rank
    places: list[Place]  # what this rank gets, in the order of the ranks that it comes from
    received: list[int]  # elements from each rank


@dataclass
class Momentum:
    """What a step knows of a parameter."""

    gradient: Tensor
    average: Tensor
    lr: float


class Muon:
    """Steps of the matrices among the parameters of `optimizers`, which step all others by AdamW.

    A matrix has momentum, as "exp_avg", and no second moment. shares: of this rank; shapes: of all matrices. Every
    method is collective over `group`.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        shares: Sequence[Share],
        shapes: Sequence[tuple[int, ...]],
        *,
        group: ProcessGroup,
        momentum: float,
    ) -> None:
        self._optimizers, self._shapes, self._momentum = optimizers, shapes, momentum
        self._ranks = GroupRanks(group)
        self._own = {share.parameter for share in shares}
        for optimizer in optimizers:
            for parameter in (p for group in optimizer.param_groups for p in group["params"] if p in self._own):
                optimizer.state[parameter] = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(parameter)}
        self._rounds = self._plan(shares)

    def _plan(self, shares: Sequence[Share]) -> list[Round]:
        """Return the rounds of a step, agreed between the ranks."""
        held = torch.zeros(len(self._shapes), dtype=torch.int64)
        for share in shares:
            held[share.place.matrix] += share.place.numel
        homes = _homes(self._shapes, (self._ranks.sum(held) / self._ranks.size).tolist(), ranks=self._ranks.size)
        ordered = sorted(shares, key=lambda share: homes[share.place.matrix][::-1])  # by rank, then round
        counts = [0] * self._ranks.size
        rounds = [
            Round([], [*counts], [], [*counts]) for _ in range(1 + max((n for n, _ in homes.values()), default=-1))
        ]
        for share in ordered:
            number, rank = homes[share.place.matrix]
            counts[rank] += 1
            rounds[number].shares.append(share)
            rounds[number].sent[rank] += share.place.numel
        incoming = self._ranks.exchange_counts(counts)
        table = torch.tensor([share.place for share in ordered], dtype=torch.int64).view(-1, len(Place._fields))
        places = [Place(*row) for row in self._ranks.send(table, counts, incoming).tolist()]
        sources = (rank for rank, count in enumerate(incoming) for _ in range(count))
        for source, place in zip(sources, places, strict=True):
            rounds[homes[place.matrix][0]].places.append(place)
            rounds[homes[place.matrix][0]].received[source] += place.numel
        for matrix, several in groupby(sorted(places), key=lambda place: place.matrix):
            held_by_all = tuple({(p.row, p.row + p.rows, p.col, p.col + p.cols) for p in several})
            faults = tiling_faults(held_by_all, self._shapes[matrix])
            assert not faults, f"matrix {matrix} {self._shapes[matrix]}: {faults}"
        return rounds

    @torch.no_grad()
    def step(self) -> None:
        """Update the matrices by their gradients, which it takes away: AdamW skips a parameter without one."""
        now: dict[Tensor, Momentum] = {}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in (each for each in group["params"] if each in self._own):
                    state, gradient = optimizer.state[parameter], parameter.grad
                    gradient = torch.zeros_like(parameter) if gradient is None else gradient  # as in buffers of zeros
                    state["step"] += 1
                    local(state["exp_avg"]).lerp_(local(gradient), 1 - self._momentum)
                    local(parameter).mul_(1 - group["lr"] * group["weight_decay"])
                    now[parameter] = Momentum(gradient, state["exp_avg"], group["lr"])
        for each in self._rounds:
            self._update(each, now)
        for parameter in self._own:
            parameter.grad = None

    def _update(self, now: Round, momenta: Mapping[Tensor, Momentum]) -> None:
        """Add the updates of a round's matrices to the parameters."""
        shares, places = now.shares, now.places
        device, sizes = self._ranks.device, [share.place.numel for share in now.shares]
        sent = torch.empty(sum(sizes), dtype=torch.bfloat16, device=device)
        for share, part in zip(shares, sent.split(sizes), strict=True):
            momentum = momenta[share.parameter]
            nesterov = share.of(momentum.gradient).lerp(share.of(momentum.average), self._momentum)
            part.view(nesterov.shape).copy_(nesterov)
        arrived = self._ranks.send(sent, now.sent, now.received)
        whole = {
            place.matrix: torch.empty(self._shapes[place.matrix], dtype=arrived.dtype, device=device)
            for place in places
        }
        for place, part in zip(places, arrived.split([place.numel for place in places]), strict=True):
            place.of(whole[place.matrix]).copy_(part.view(place.rows, place.cols))
        updates = {number: orthogonalised(matrix) for number, matrix in whole.items()}
        answer = [place.of(updates[place.matrix]).reshape(-1) for place in places]
        returned = self._ranks.send(torch.cat([arrived[:0], *answer]), now.received, now.sent)
        for share, part in zip(shares, returned.split(sizes), strict=True):
            target, shape = share.of(share.parameter), torch.Size(self._shapes[share.place.matrix])
            lr = _adjust_lr(momenta[share.parameter].lr, "match_rms_adamw", shape)
            target.add_(part.view(target.shape).to(target.device), alpha=-lr)


def orthogonalised(matrix: Tensor) -> Tensor:
    """Return the nearest half-orthogonal matrix, about, by torch's Newton-Schulz; bf16 both."""
    return _zeropower_via_newtonschulz(matrix, (DEFAULT_A, DEFAULT_B, DEFAULT_C), DEFAULT_NS_STEPS, EPS)


def _homes(shapes: Sequence[tuple[int, ...]], held: Sequence[float], *, ranks: int) -> dict[int, tuple[int, int]]:
    """Return (round, rank) of each matrix that somebody holds; work is balanced in each round.

    held: elements of each matrix, on average over the ranks.
    """
    rounds: list[list[int]] = []
    size = float(ROUND)
    for matrix, elements in enumerate(held):
        if elements and size + elements > ROUND:
            rounds.append([])
            size = 0.0
        if elements:
            rounds[-1].append(matrix)
            size += elements
    homes = {}
    for number, members in enumerate(rounds):
        work = [shapes[matrix][0] * shapes[matrix][1] * min(shapes[matrix]) for matrix in members]
        for rank, chosen in enumerate(partition_balanced(work, ranks, equal_counts=False)):
            homes |= {members[i]: (number, rank) for i in chosen}
    return homes


def shares_of(stepped: Tensor, windows: Iterable[Window], shape: torch.Size, *, first: int = 0) -> Iterator[Share]:
    """Yield what a rank holds of a parameter's windows: rows, or elements from `first` on; shape: of the whole."""
    height, width = matrix_shape(tuple(shape))
    if isinstance(stepped, DTensor):
        first = rows_here(stepped).offset[0] * shape[1:].numel()
    boxes = list(flat_boxes((height, width), first, first + local(stepped).numel()))
    for window in windows:
        for part in (part for box in boxes if (part := _inside(window, box)) is not None):
            strides = (part.step, width) if part.transposed else (width, 1)
            yield Share(Place(*part[:5]), stepped, part.top * width + part.left - first, strides)


def _inside(window: Window, box: Box) -> Window | None:
    """Return the part of a window in a box of its tensor; around a transposed window a box has whole rows."""
    (top, left), (height, width) = box
    down, along = max(top - window.top, 0), max(left - window.left, 0)
    tall = min(top + height - window.top, window.cols if window.transposed else window.rows) - down
    wide = window.rows if window.transposed else min(left + width - window.left, window.cols) - along
    if min(tall, wide) <= 0:
        return None
    if window.transposed:
        return window._replace(col=window.col + down, cols=tall, top=window.top + down)
    place = {"row": window.row + down, "col": window.col + along, "rows": tall, "cols": wide}
    return window._replace(**place, top=window.top + down, left=window.left + along)


def muon_of_chunks(
    chunks: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer,
    *,
    sharding: Sharding,
    groups: Groups,
    momentum: float,
) -> Muon:
    """Return Muon for Megatron-Core's chunks; each pipeline rank works out its own matrices. Collective."""
    shapes, on_disk = matrices(sharding.hf, sharding.head)
    windows: dict[int, list[Window]] = {}  # by the parameter's id
    for vp_stage, chunk in enumerate(chunks):
        live = weights_of(unwrapped(chunk))
        for plan in build_plan(sharding, groups.coordinates, vp_stage=vp_stage):
            windows[id(live[plan.name])] = list(windows_of(plan.copies, on_disk))
    shares = [
        share
        for part in parts(optimizer)
        if part.optimizer is not None
        for parameter, first, stepped in stepped_parameters(part)
        for share in shares_of(stepped, windows[id(parameter)], parameter.shape, first=first)
    ]
    _check_used(shares, GroupRanks(groups.world))
    return Muon(torch_optimizers(optimizer), shares, shapes, group=groups.collection.tp_dp_cp, momentum=momentum)


def muon_of_rows(
    parameters: Mapping[str, DTensor],
    optimizer: torch.optim.Optimizer,
    *,
    sharding: Sharding,
    groups: Groups,
    momentum: float,
) -> Muon:
    """Return Muon for a model of transformers under FSDP2; parameters: by transformers' name. Collective."""
    hf = sharding.hf
    shapes, on_disk = matrices(hf, sharding.head)
    shares: list[Share] = []
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            continue
        disk = disk_tensors(hf.family, name, tuple(parameter.shape), hf.own)
        windows = [w._replace(top=w.top + tensor.row) for tensor in disk for w in on_disk.get(tensor.name, ())]
        shares += shares_of(parameter, windows, parameter.shape)
    _check_used(shares, GroupRanks(groups.world))
    return Muon([optimizer], shares, shapes, group=groups.dp, momentum=momentum)


def _check_used(shares: Sequence[Share], world: GroupRanks) -> None:
    if not world.max(torch.tensor(len(shares))):
        raise UserError(
            "optim.name=muon: no weight that trains is a matrix inside a layer; set optim.name=adam, or train others"
        )
