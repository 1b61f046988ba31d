"""Muon: orthogonalised momentum of matrices, each worked out whole on one of the ranks that share it.

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
from torch.optim import _muon as upstream

from mega_rl.converters.live.load import weights_of
from mega_rl.converters.plan.matrices import Window, matrices, windows_of
from mega_rl.converters.plan.parameters import disk_tensors
from mega_rl.converters.plan.proof import tiling_faults
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

ROUND = 1 << 26  # elements per rank that travel at a time, about
SETTINGS = (upstream.DEFAULT_A, upstream.DEFAULT_B, upstream.DEFAULT_C), upstream.DEFAULT_NS_STEPS, upstream.EPS


class Share(NamedTuple):
    """A rectangle of a matrix in this rank's memory."""

    window: Window  # only its place in the matrix
    parameter: Tensor  # the one that the optimizer steps
    start: int  # elements before the rectangle in this rank's part of the parameter
    strides: tuple[int, int]

    def of(self, tensor: Tensor) -> Tensor:
        """Return the rectangle of the parameter, its gradient or its momentum, [rows, cols], a view."""
        memory = local(tensor)
        return memory.as_strided(self.window[3:5], self.strides, memory.storage_offset() + self.start)


# Shares of this rank in the order of the ranks that they go to, and elements to each; rectangles that come in the order
# of the ranks that they come from, and elements from each.
Round = tuple[list[Share], list[int], list[Window], list[int]]


class Muon:
    """Steps of the matrices among the parameters of `optimizers`, whose AdamW steps all others.

    A matrix has one moment, "exp_avg". Each pipeline rank works out its own matrices; collective over the world.

    Raises UserError: no matrix trains.
    """

    def __init__(
        self,
        optimizers: Iterable[torch.optim.Optimizer],
        shares: Iterable[Share],
        *,
        momentum: float,
        sharding: Sharding,
        groups: Groups,
    ) -> None:
        self._momentum, self._shapes = momentum, matrices(sharding.hf, sharding.head)[0]
        self._ranks = GroupRanks(groups.collection.tp_dp_cp)
        held, own = torch.zeros(len(self._shapes), dtype=torch.float64), list(shares)
        for share in own:
            held[share.window.matrix] += share.window.numel / self._ranks.size
        if not GroupRanks(groups.world).max(torch.tensor(len(own))):
            raise UserError("optim.name=muon: no weight that trains is a matrix inside a layer; set optim.name=adam")
        self._members: dict[Tensor, tuple[dict[str, Tensor], dict[str, Any]]] = {}  # parameter -> state, settings
        for optimizer in optimizers:
            for settings in optimizer.param_groups:
                for parameter in {share.parameter for share in own}.intersection(settings["params"]):
                    state = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(parameter, requires_grad=False)}
                    optimizer.state[parameter] = state
                    self._members[parameter] = state, settings
        homes = _homes(self._shapes, self._ranks.sum(held).tolist(), ranks=self._ranks.size)
        self._rounds = [self._agree(own, home) for home in homes]

    def _agree(self, shares: Iterable[Share], homes: Mapping[int, int]) -> Round:
        """Return the round of some matrices, by the rank of each; collective."""
        shares = sorted((s for s in shares if s.window.matrix in homes), key=lambda s: homes[s.window.matrix])
        counts, sent = [0] * self._ranks.size, [0] * self._ranks.size
        for share in shares:
            counts[homes[share.window.matrix]] += 1
            sent[homes[share.window.matrix]] += share.window.numel
        table = torch.tensor([share.window[:5] for share in shares], dtype=torch.int64).view(-1, 5)
        rows = self._ranks.send(table, counts, self._ranks.exchange_counts(counts)).tolist()
        windows = [Window(*row) for row in rows]
        for matrix, several in groupby(sorted(windows), key=lambda window: window.matrix):
            tiles = tuple({(w.row, w.row + w.rows, w.col, w.col + w.cols) for w in several})
            assert not tiling_faults(tiles, self._shapes[matrix]), f"matrix {matrix} {self._shapes[matrix]}: {tiles}"
        return shares, sent, windows, self._ranks.exchange_counts(sent)

    @torch.no_grad()
    def step(self) -> None:
        """Update the matrices by their gradients, which it takes away: AdamW skips a parameter without one."""
        for parameter, (state, settings) in self._members.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            state["step"] += 1
            local(state["exp_avg"]).lerp_(local(parameter.grad), 1 - self._momentum)
            local(parameter).mul_(1 - settings["lr"] * settings["weight_decay"])
        for each in self._rounds:
            self._update(*each)
        for parameter in self._members:
            parameter.grad = None

    def _update(self, shares: list[Share], sent: list[int], windows: list[Window], received: list[int]) -> None:
        """Add the updates of a round's matrices to this rank's shares."""
        sizes = [share.window.numel for share in shares]
        momentum = torch.empty(sum(sent), dtype=torch.bfloat16, device=self._ranks.device)
        for share, part in zip(shares, momentum.split(sizes), strict=True):
            gradient, average = share.parameter.grad, self._members[share.parameter][0]["exp_avg"]
            assert gradient is not None
            part.copy_(share.of(gradient).lerp(share.of(average), self._momentum).flatten())  # Nesterov's
        arrived = self._ranks.send(momentum, sent, received)
        whole = {w.matrix: arrived.new_empty(self._shapes[w.matrix]) for w in windows}
        for window, part in zip(windows, arrived.split([w.numel for w in windows]), strict=True):
            _rectangle(whole[window.matrix], window).copy_(part.view(window.rows, window.cols))
        for matrix in whole:
            whole[matrix] = upstream._zeropower_via_newtonschulz(whole[matrix], *SETTINGS)
        answer = [_rectangle(whole[window.matrix], window).flatten() for window in windows]
        update = self._ranks.send(torch.cat([arrived[:0], *answer]), received, sent)
        for share, part in zip(shares, update.split(sizes), strict=True):
            target, shape = share.of(share.parameter), torch.Size(self._shapes[share.window.matrix])
            lr = upstream._adjust_lr(self._members[share.parameter][1]["lr"], "match_rms_adamw", shape)
            target.add_(part.view(target.shape).to(target.device), alpha=-lr)


def _rectangle(matrix: Tensor, window: Window) -> Tensor:
    return matrix[window.row : window.row + window.rows, window.col : window.col + window.cols]


def _homes(shapes: Sequence[tuple[int, ...]], held: Sequence[float], *, ranks: int) -> Iterator[dict[int, int]]:
    """Yield the rank of each matrix of a round, with about equal work for all ranks.

    held: elements of each matrix on a rank, on average; none of one that does not train.
    """
    rounds = [int(end // ROUND) for end in accumulate(held)]
    for _, members in groupby((m for m, elements in enumerate(held) if elements), key=rounds.__getitem__):
        chosen = list(members)
        work = [shapes[matrix][0] * shapes[matrix][1] * min(shapes[matrix]) for matrix in chosen]
        parts_of_ranks = partition_balanced(work, ranks, equal_counts=False)
        yield {chosen[i]: rank for rank, mine in enumerate(parts_of_ranks) for i in mine}


def _shares(stepped: Tensor, windows: Iterable[Window], shape: torch.Size, first: int = 0) -> Iterator[Share]:
    """Yield what a rank holds of a parameter's windows: rows, or elements from `first` on; shape: of the whole."""
    width = matrix_shape(tuple(shape))[1]
    if isinstance(stepped, DTensor):
        first = rows_here(stepped).offset[0] * shape[1:].numel()
    for w in windows:
        # As the tensor has it: a window's elements in the order of memory, of which a rank holds consecutive ones.
        lines, wide = (w.cols, w.rows) if w.transposed else (w.rows, w.cols)
        start = w.top * width + w.left - first
        before = []
        for end in (0, local(stepped).numel()):
            line, place = divmod(end - start, width)
            before.append(min(max(line * wide + min(-(-place // w.step), wide), 0), lines * wide))
        for (down, along), (tall, broad) in flat_boxes((lines, wide), *before):
            place_in = (
                (w.row + along, w.col + down, broad, tall)
                if w.transposed
                else (w.row + down, w.col + along, tall, broad)
            )
            strides = (w.step, width) if w.transposed else (width, 1)
            yield Share(Window(w.matrix, *place_in), stepped, start + down * width + along * w.step, strides)


def shares_of_chunks(
    chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer, sharding: Sharding, at: RankCoordinates
) -> Iterator[Share]:
    """Yield what a rank's optimizer of chunks of Megatron-Core steps of matrices."""
    windows: dict[int, list[Window]] = {}  # by the parameter's id
    for vp_stage, chunk in enumerate(chunks):
        live = weights_of(unwrapped(chunk))
        for plan in build_plan(sharding, at, vp_stage=vp_stage):
            on_disk = matrices(sharding.hf, sharding.head)[1]
            windows[id(live[plan.name])] = list(windows_of(plan.copies, on_disk))
    for part in parts(optimizer):
        for parameter, first, stepped in stepped_parameters(part) if part.optimizer is not None else ():
            yield from _shares(stepped, windows[id(parameter)], parameter.shape, first)


def shares_of_rows(parameters: Mapping[str, DTensor], sharding: Sharding) -> Iterator[Share]:
    """Yield what a rank holds of the matrices that train of a model of transformers, by its names."""
    hf, on_disk = sharding.hf, matrices(sharding.hf, sharding.head)[1]
    for name, parameter in parameters.items():
        disk = disk_tensors(hf.family, name, tuple(parameter.shape), hf.own) if parameter.requires_grad else ()
        windows = [w._replace(top=w.top + tensor.row) for tensor in disk for w in on_disk.get(tensor.name, ())]
        yield from _shares(parameter, windows, parameter.shape)
