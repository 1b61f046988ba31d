"""A strict stand-in for NCCL: a c10d backend over gloo that compares the calls of a group's ranks.

NCCL matches calls by their order and checks nothing: two ranks with different calls hang, or exchange wrong bytes.
Here the second rank to come raises, with both calls; a call that a peer never makes ends at the group's deadline, with
the last calls of all ranks. NCCL's own rules hold, too: contiguous tensors of dtypes that it knows, on its device.
Groups over gloo must be partitions: torch lets ranks that a group leaves out take part in the births of others.

`make test-nccl` runs the tests of several ranks on it (`MEGA_RL_TESTS_NCCL=strict`, read by `run_ranks`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, AllToAllOptions, ReduceScatterOptions
from torch.distributed import distributed_c10d

NAME = "strict_nccl"
VARIABLE = "MEGA_RL_TESTS_NCCL"
# Dtypes that torch's NCCL backend has no type for.
UNKNOWN = {torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex32}
GROUPS: Counter[str] = Counter()  # births that this process took part in, by backend


class CallMismatch(RuntimeError):
    """Ranks of a group made different calls, or one that NCCL refuses."""


class StrictWork(dist.Work):
    """A pending call; waiting for it in vain says which calls the group's ranks made last."""

    def __init__(self, works: Sequence[Any], group: StrictNccl, call: str, then: Callable[[], Any] | None) -> None:
        super().__init__()
        self._works, self._group, self._call, self._then = list(works), group, call, then

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the call to end. Raises RuntimeError at the deadline, with the last calls of all ranks."""
        try:
            for work in self._works:
                work.wait() if timeout is None else work.wait(timeout)
        except RuntimeError as error:
            raise RuntimeError(f"{error}\nwaited in {self._call}; {self._group.last_calls()}") from error
        self._finish()
        return True

    def synchronize(self) -> None:
        """Wait for the call."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the call has ended."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Return whether the call has ended without an error."""
        return all(work.is_success() for work in self._works)

    def get_future(self) -> Any:
        """Return the future of the call, for functional collectives."""
        return self._works[-1].get_future()

    def result(self) -> Any:
        """Return the call's tensors."""
        return self._works[-1].result()

    def _finish(self) -> None:
        then, self._then = self._then, None
        if then is not None:
            then()


class StrictNccl(dist.ProcessGroup):
    """A group of this backend. `device`: type of the device on which its tensors have to be."""

    device = "cpu"

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store, self._own, self._size = dist.PrefixStore("strict", store), rank, size
        self._calls: Counter[str] = Counter()  # by pair of ranks, or "" of the whole group
        self._batch: list[Any] | None = None
        self._inner = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._register_backend(torch.device(self.device), dist.ProcessGroup.BackendType.CUSTOM, self._inner)

    # -- comparison

    def last_calls(self) -> str:
        """Return the last call of each rank, in words."""
        texts = []
        for rank in range(self._size):
            last = self._store.get(f"last/{rank}").decode() if self._store.check([f"last/{rank}"]) else "no call"
            texts.append(f"rank {rank}: {last}")
        return f"last calls in group {self.group_desc}: " + "; ".join(texts)

    def _check(
        self, name: str, tensors: Sequence[Tensor], detail: str = "", *, pair: str = "", shapes: bool = True
    ) -> str:
        """Compare a call with the one that another rank made in its place; return it in words."""
        for tensor in tensors:
            if tensor.device.type != self.device:
                raise CallMismatch(f"{name}: NCCL has no tensor of the {tensor.device.type}, only of its device")
            if not tensor.is_contiguous():
                raise CallMismatch(f"{name}: NCCL takes contiguous tensors, not {tuple(tensor.stride())}")
            if tensor.dtype in UNKNOWN:
                raise CallMismatch(f"{name}: NCCL has no type for {tensor.dtype}")
        kinds = [f"{t.dtype} {list(t.shape) if shapes else ''}".strip() for t in tensors]
        return self._compare(" ".join(filter(None, (name, *dict.fromkeys(kinds), f"x{len(kinds)}", detail))), pair)

    def _compare(self, call: str, pair: str) -> str:
        number = self._calls[pair]
        self._calls[pair] += 1
        where = f"call {number}" + (f" of {pair}" if pair else "")
        self._store.set(f"last/{self._own}", f"{where}: {call}")
        first = self._store.compare_set(f"{pair}/{number}", "", f"{self._own}|{call}").decode()
        rank, _, other = first.partition("|")
        if other != call:
            raise CallMismatch(
                f"{where} in group {self.group_desc}: rank {self._own} makes {call}, rank {rank} made {other}"
            )
        return f"{where}: {call}"

    def _work(self, works: Any, call: str, then: Callable[[], Any] | None = None) -> Any:
        work = StrictWork(works if isinstance(works, list) else [works], self, call, then)
        if self._batch is not None:
            self._batch.append(work)
        return work

    def _pairs(self, name: str, sent: Sequence[int], received: Sequence[int]) -> None:
        """Compare what each pair of ranks sends and expects, in elements."""
        number = self._calls[""]
        for peer in range(self._size):
            for key, count in ((f"{self._own}>{peer}", sent[peer]), (f"{peer}>{self._own}", received[peer])):
                first = self._store.compare_set(f"{name}/{number}/{key}", "", f"{self._own}|{count}").decode()
                rank, _, other = first.partition("|")
                if int(other) != count:
                    raise CallMismatch(
                        f"{name} in group {self.group_desc}: of {key}, rank {self._own} has {count} elements and rank "
                        f"{rank} {other}"
                    )

    # -- calls, by torch's names

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        call = self._check("all_reduce", tensors, _op(opts))
        then = _summed(opts, tensors, self._size)
        return self._work(self._inner.allreduce(tensors, opts), call, then)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> Any:
        one = AllreduceOptions()
        one.reduceOp = opts.reduceOp
        return self._work([self.allreduce([tensor], one) for tensor in tensors], "all_reduce_coalesced")

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        call = self._check("broadcast", tensors, f"from {opts.rootRank}")
        return self._work(self._inner.broadcast(tensors, opts), call)

    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        call = self._check("reduce", tensors, f"{_op(opts)} to {opts.rootRank}")
        return self._work(self._inner.reduce(tensors, opts), call)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        shapes = [list(tensor.shape) for tensor in outputs[0]]
        call = self._check("all_gather", inputs, f"into {shapes}", shapes=False)
        return self._work(self._inner.allgather(outputs, inputs, opts or AllgatherOptions()), call)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        call = self._check("all_gather_single", [output, input])
        return self._work(self._inner._allgather_base(output, input, opts or AllgatherOptions()), call)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        works = [self.all_gather_single(*pair) for pair in zip(outputs, inputs, strict=True)]
        return self._work(works, "all_gather_single_coalesced")

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        call = self._check("reduce_scatter", [*outputs, *inputs[0]], _op(opts), shapes=False)
        then = _summed(opts, outputs, self._size)
        return self._work(self._inner.reduce_scatter(outputs, inputs, opts), call, then)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> Any:
        call = self._check("reduce_scatter_single", [output, input], _op(opts))
        then = _summed(opts, [output], self._size)
        return self._work(self._inner._reduce_scatter_base(output, input, opts), call, then)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Any:
        works = []
        for output, input in zip(outputs, inputs, strict=True):
            one = ReduceScatterOptions()
            one.reduceOp = opts.reduceOp
            works.append(self.reduce_scatter_single(output, input, one))
        return self._work(works, "reduce_scatter_single_coalesced")

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> Any:
        row = input[:1].numel() if len(input) else output[:1].numel()
        sent = [size * row for size in input_sizes] or [input.numel() // self._size] * self._size
        received = [size * row for size in output_sizes] or [output.numel() // self._size] * self._size
        self._pairs("all_to_all_single", sent, received)
        call = self._check("all_to_all_single", [output, input], shapes=False)
        opts = opts or AllToAllOptions()
        return self._work(self._inner.alltoall_base(output, input, output_sizes, input_sizes, opts), call)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        self._pairs("all_to_all", [tensor.numel() for tensor in inputs], [tensor.numel() for tensor in outputs])
        call = self._check("all_to_all", [*outputs, *inputs], shapes=False)
        return self._work(self._inner.alltoall(outputs, inputs, opts or AllToAllOptions()), call)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:
        call = self._check("gather", inputs, f"to {opts.rootRank}")
        return self._work(self._inner.gather(outputs, inputs, opts), call)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        call = self._check("scatter", outputs, f"from {opts.rootRank}")
        return self._work(self._inner.scatter(outputs, inputs, opts), call)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        # Order decides, not the tag: NCCL has none.
        call = self._check("message", tensors, pair=f"{self._own}>{peer}")
        return self._work(self._inner.send(tensors, peer, tag), call)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        call = self._check("message", tensors, pair=f"{peer}>{self._own}")
        return self._work(self._inner.recv(tensors, peer, tag), call)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Any:
        raise CallMismatch("recv from any rank: NCCL has to know the sender")

    def barrier(self, opts: Any = None) -> Any:
        if not self._calls.total():
            raise CallMismatch("barrier as a group's first call: NCCL would guess the GPU of its tensor")
        call = self._compare("barrier", "")
        return self._work(self._inner.barrier(opts), call)

    # Names of releases before 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> Any:
        works, self._batch = self._batch or [], None
        return self._work(works, "coalesced calls")


def _op(opts: Any) -> str:
    names = ("SUM", "AVG", "MAX", "MIN", "PRODUCT", "BAND", "BOR", "BXOR")
    return next(name for name in names if opts.reduceOp == getattr(dist.ReduceOp, name))


def _summed(opts: Any, tensors: Sequence[Tensor], size: int) -> Callable[[], Any] | None:
    """Let gloo sum where it cannot average; return what then divides."""
    if opts.reduceOp != dist.ReduceOp.AVG:
        return None
    opts.reduceOp = dist.ReduceOp.SUM
    return lambda: [tensor.div_(size) for tensor in tensors]


class Births:
    """Births of groups, in which every rank of the world takes part; those over gloo must be partitions of it."""

    def __init__(self) -> None:
        self._covered: set[int] = set()  # ranks of the groups over gloo since the last whole partition
        self._new_group = distributed_c10d.new_group

    def new_group(self, ranks: Sequence[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Make a group. Raises CallMismatch where ranks make different ones, or gloo's are no partition."""
        if not isinstance(dist.group.WORLD, StrictNccl):
            return self._new_group(ranks, *args, **kwargs)
        world, backend = dist.get_world_size(), kwargs.get("backend") or (args[1] if len(args) > 1 else None) or NAME
        members = set(range(world)) if ranks is None else set(ranks)
        dist.group.WORLD._compare(f"group of {sorted(members)} over {backend}", "births")
        GROUPS[backend] += 1
        if backend != NAME:
            if members & self._covered or (self._covered and len(members) == world):
                self.end()
            self._covered |= members
            if len(self._covered) == world:
                self._covered = set()
        return self._new_group(ranks, *args, **kwargs)

    def end(self) -> None:
        """Raise CallMismatch where the last groups leave ranks out."""
        if self._covered:
            raise CallMismatch(f"groups over gloo have the ranks {sorted(self._covered)} and leave out the others")


def install() -> Births:
    """Let this process's world be of this backend, unless it asks for gloo by name."""
    from mega_rl.parallel.accelerator import prepare

    births = Births()
    dist.Backend.register_backend(NAME, StrictNccl, devices=["cpu"])  # type: ignore[arg-type]
    dist.new_group = distributed_c10d.new_group = births.new_group
    object.__setattr__(prepare("cpu"), "backend", NAME)
    return births
