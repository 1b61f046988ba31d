"""Read the collectives in flight from torch's flight recorder."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import TypedDict

import torch.distributed as dist
from torch._C import _distributed_c10d

from mega_rl.tracking.health.records import MAX_MEMBERS, Collective

# A look at the recorder costs 10 us per entry; it is taken only while the rank does not move.
VARIABLE, ENTRIES = "TORCH_FR_BUFFER_SIZE", 512

# Descriptions of groups by Megatron-Core and, of the world, by torch, in the words of the settings.
GROUPS: Mapping[str, str] = {
    "default_pg": "world",
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "MODEL_PARALLEL_GROUP": "tp-pp",
    "DATA_PARALLEL_GROUP": "dp",
    "DATA_PARALLEL_GROUP_WITH_CP": "dp-cp",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp-cp",
    "TENSOR_AND_DATA_PARALLEL_GROUP": "tp-dp",
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp-dp-cp",
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "EXPERT_TENSOR_PARALLEL_GROUP": "etp",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "ep-etp",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "ep-etp-pp",
    "EXPERT_DATA_PARALLEL_GROUP": "expert dp",
}


class Flight(TypedDict):
    """Fields of an entry of the recorder."""

    process_group: tuple[str, str]  # name, description
    profiling_name: str  # gloo:all_reduce
    is_p2p: bool
    p2p_seq_id: int
    collective_seq_id: int
    time_created_ns: int
    timeout_ms: int
    state: str
    retired: bool


class FlightRecorder:
    """`heartbeat.Flights` of this process's groups. torch does not record messages between two ranks over gloo."""

    def __init__(self) -> None:
        """Let groups that this process makes from now on record their last collectives."""
        os.environ.setdefault(VARIABLE, str(ENTRIES))
        self._looked = time.monotonic()
        self._called: dict[tuple[str, int], float] = {}  # monotonic time of open ones, by group and torch's time

    def __call__(self) -> tuple[Collective | None, Collective | None, tuple[Collective, ...]]:
        """Return (the oldest collective in flight, the last one called, the last one of each group)."""
        entries = _entries()
        open_entries = [entry for entry in entries if not entry["retired"] and entry["state"] != "completed"]
        ages = self._ages(open_entries)
        oldest = max(range(len(ages)), key=ages.__getitem__, default=None)
        newest = max(entries, key=lambda entry: entry["time_created_ns"], default=None)
        last = {entry["process_group"][0]: entry for entry in entries}
        return (
            None if oldest is None else _collective(open_entries[oldest], ages[oldest]),
            None if newest is None else _collective(newest, _age(newest)),
            tuple(_collective(entry, _age(entry), ranks=False) for entry in last.values()),
        )

    def _ages(self, open_entries: Sequence[Flight]) -> list[float]:
        """Return the seconds since each call, also after jumps of the wall clock."""
        now = time.monotonic()
        keys = [(entry["process_group"][0], entry["time_created_ns"]) for entry in open_entries]
        since = now - self._looked
        self._called = {
            key: self._called.get(key, now - min(_age(entry), since))
            for key, entry in zip(keys, open_entries, strict=True)
        }
        self._looked = now
        return [now - self._called[key] for key in keys]


def _entries() -> list[Flight]:
    dump = getattr(_distributed_c10d, "_dump_fr_trace_json")  # noqa: B009 - not in the stubs
    entries: list[Flight] = json.loads(dump(True, False)).get("entries", [])
    return entries


def _age(entry: Flight) -> float:
    """Return the seconds since a collective was called, by the wall clock."""
    return max(0.0, (time.time_ns() - entry["time_created_ns"]) / 1e9)


def _collective(entry: Flight, age_s: float, *, ranks: bool = True) -> Collective:
    name, description = entry["process_group"]
    # "host tp" is the gloo group next to an NCCL group.
    on_host, described = ("host ", description[5:]) if description.startswith("host ") else ("", description)
    return Collective(
        operation=entry["profiling_name"].partition(":")[2] or entry["profiling_name"],
        group=on_host + GROUPS.get(described, described.removesuffix("_GROUP").lower()),
        ranks=_members(name) if ranks else (),
        sequence=entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"],
        age_s=age_s,
        deadline_s=entry["timeout_ms"] / 1e3 if entry["timeout_ms"] > 0 else None,
    )


def _members(name: str) -> tuple[int, ...]:
    """Return the ranks of a group by its name in torch; empty if unknown."""
    groups = dist.distributed_c10d._world.pg_names
    group = next((group for group, known in groups.items() if known == name), None)
    return () if group is None else tuple(sorted(dist.get_process_group_ranks(group))[:MAX_MEMBERS])
