"""Format and reader of records: numpy arrays and rows of texts, checked against their checksums.

from mega_rl.tracking.records.reader import read_record

record = read_record("runs/a/records/step_000011")
record.tensors["advantages"]   # [N, S] float32, rows by prompt and sample
record.rows[3]["token_texts"]  # text of each token of row 3
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from mega_rl.converters.safetensors.header import read_entries
from mega_rl.errors import UserError
from mega_rl.untrusted import JsonFields, parse_object, read_file

Array: TypeAlias = npt.NDArray[Any]

FORMAT = 1
FOLDER = "records"  # in a run's folder
RECORD_FILE, WEIGHTS = "record.json", "weights"
MAX_RECORD_BYTES = 16 << 20
_STEP = re.compile(r"step_([0-9]{6,12})")
_SHARD = re.compile(r"replica_\d{5}\.(?:safetensors|jsonl)")

_DTYPES = {"F64": np.float64, "F32": np.float32, "BOOL": np.bool_}
_DTYPES |= {"I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8}

# Tensors in causal order. A record lacks the tensors that its step did not compute.
# [N] has one number for each row, [N, S] one for each token, aligned to the token that it describes.
TENSORS: Mapping[str, str] = {
    "prompt_index": "[N] position of the row's prompt in the step's batch",
    "sample_index": "[N] number of the sample of its prompt",
    "prompt_lengths": "[N] tokens of the prompt",
    "lengths": "[N] tokens of prompt and response",
    "branch": "[N] number of the row within its sample, where a sample has several rows",
    "end": "[N] how the sample ended: 0 done, 1 cut off by length, 2 by a limit of turns, 3 failed",
    "failed": "[N] without an answer",
    "weight_version": "[N] oldest version of the weights that sampled the row",
    "tokens": "[N, S] prompt, response, padding of 0",
    "loss_mask": "[N, S] tokens that the policy sampled",
    "turn": "[N, S] turn of the sample that the token is of, from 1; 0: read; off loss_mask it trains in another row",
    "token_versions": "[N, S] version of the weights that sampled the token",
    "kept": "[N, S] sampled on KV cache kept over an update: no version's weights give its log-prob",
    "routing": "[N, S, L, K] experts that each of L mixtures gave the token",
    "rollout_logprobs": "[N, S] of the engine that sampled",
    "policy_logprobs": "[N, S] of the trainer before the update, where old_logprobs are not",
    "old_logprobs": "[N, S] that the ratio of the loss is taken to",
    "entropy": "[N, S] nats, of the trainer's distribution before the update that predicts the token",
    "ref_logprobs": "[N, S] of the reference",
    "values": "[N, S] of the critic before the update",
    "turn_scores": "[N, S] the environment's scores of turns, at their last tokens",
    "rewards": "[N] as scored",
    "reward_parts": "[N, K] named parts of the rewards, before weights",
    "greedy_rewards": "[N] of the greedy response to the row's prompt",
    "shaped_rewards": "[N] after the punishment of overlong responses",
    "kl_penalty": "[N, S] taken off token rewards",
    "advantages": "[N, S]",
    "returns": "[N, S] value targets",
    "train_mask": "[N, S] tokens that train: loss_mask without filtered responses",
    "minibatch": "[N] number of the update that trains the row, in the first epoch",
    "epoch_minibatches": "[N, E] the same in each of E epochs, where there are several",
    "token_weights": "[N, S] 1 / tokens of the mini-batch",
    "loss_weights": "[N, S] share of the token in its mini-batch's policy loss",
    "correction_weights": "[N, S] of the token's loss in the first update, for what sampled it",
}
MODEL_OUTPUTS = ("policy_logprobs", "old_logprobs", "entropy", "ref_logprobs", "values")
INPUTS = (*tuple(TENSORS)[: tuple(TENSORS).index("policy_logprobs")], "rewards", "reward_parts", "greedy_rewards")


@dataclass(frozen=True)
class Shard:
    """One file of a record."""

    file: str  # "replica_00000.safetensors"
    nbytes: int
    sha256: str
    rows: int


REDRAWN = "redrawn"  # reason of a group that was too old, whose prompt is sampled again


class DroppedGroup(NamedTuple):
    """A group that no step trains; its means are None without an answer."""

    ticket: int
    reason: str
    tokens: float | None  # response tokens
    reward: float | None


@dataclass(frozen=True)
class RecordDescription:
    """Content of record.json, without the files."""

    step: int  # counted from 1, as in metrics.jsonl: the weights of step - 1 computed it
    prompts: int  # number in the step's batch
    kl_coef: float  # before the step's updates
    reward_parts: tuple[str, ...]  # names of the columns of `reward_parts`
    reward_weights: tuple[float, ...]  # one for each part
    config: JsonFields  # the run's settings, nested
    model: dict[str, str]  # identity by content of the checkpoint that the run began with
    weights: tuple[str, ...]  # roles whose weights are in the record
    layout: str
    world_size: int
    device: str  # "cpu" or "cuda"
    dtype: str  # "fp32" or "bf16"
    versions: dict[str, str]  # package -> version
    # Records of earlier releases lack the following.
    weight_version: int = -1  # the trainer's, when the step began
    # The same of trainer.async_steps steps before and of this one; 0: unknown. Empty: versions count steps.
    begun: tuple[int, ...] = ()
    tickets: tuple[int, ...] = ()  # number of each prompt's draw since the run began
    data_rows: tuple[int, ...] = ()  # each prompt's row of the data
    dropped: tuple[DroppedGroup, ...] = ()  # groups that were drawn and will not train

    @property
    def steps_before(self) -> int:
        """Return the number of steps whose weights the record's step began with."""
        return self.step - 1


def folder_of(root: Path, step: int) -> Path:
    """Return the folder of the record of a step, counted from 1."""
    return root / f"step_{step:06d}"


def records(root: Path) -> list[Path]:
    """Return the folders of complete records, oldest first."""
    names = os.listdir(root) if root.is_dir() else []
    steps = {int(match[1]): root / name for name in names if (match := _STEP.fullmatch(name))}
    return [steps[step] for step in sorted(steps)]


def to_json(description: RecordDescription, shards: list[Shard], tensors: Mapping[str, str]) -> JsonFields:
    """Return the content of record.json; tensors: dtype of each."""
    listed = {name: tensors[name] for name in TENSORS if name in tensors}
    files = [asdict(shard) for shard in shards]
    return {"format": FORMAT, **asdict(description), "tensors": listed, "files": files}


def parse(text: bytes, path: Path) -> tuple[RecordDescription, list[Shard], dict[str, str]]:
    """Return (description, files, dtype of each tensor) of the text of a record.json. Raises UserError."""
    try:
        raw = parse_object(text)
    except ValueError as error:
        raise UserError(f"{path}: {error}; the record is damaged") from error
    if raw.get("format") != FORMAT:
        raise UserError(
            f"{path}: format={raw.get('format')!r}, this version reads {FORMAT}; use the version that wrote it"
        )
    try:
        needed = [field.name for field in fields(RecordDescription) if field.default is MISSING]
        kept = {name: raw[name] for name in needed} | {"weight_version": int(raw.get("weight_version", -1))}
        names = ("reward_parts", "reward_weights", "weights", "begun", "tickets", "data_rows")
        tuples = {name: tuple(raw.get(name, ())) for name in names}
        tuples["dropped"] = tuple(DroppedGroup(*group) for group in raw.get("dropped", ()))
        description = RecordDescription(**{**kept, **tuples})
        shards = [Shard(**entry) for entry in raw["files"]]
        tensors = {str(name): str(dtype) for name, dtype in raw["tensors"].items()}
        if description.step < 1 or not shards or not set(description.weights) <= {"actor", "critic", "reference"}:
            raise ValueError("step, files or weights are out of range")
        if unknown := set(tensors) - set(TENSORS):
            raise ValueError(f"unknown tensors {sorted(unknown)}")
        if foreign := [shard.file for shard in shards if not _SHARD.fullmatch(shard.file)]:
            raise ValueError(f"file {foreign[0]!r} does not belong to a record")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{path}: is not a record ({type(error).__name__}: {error}); it is damaged") from error
    return description, shards, tensors


@dataclass(frozen=True)
class Record:
    """A record that was read, its rows in the order of prompts and samples."""

    folder: Path
    description: RecordDescription
    tensors: dict[str, Array]  # [N] or [N, S, ...] by the names of `TENSORS`, in their order
    files: tuple[Shard, ...]

    @cached_property
    def rows(self) -> list[JsonFields]:
        """Return the rows for people, maybe none, in the order of `tensors`. Raises UserError."""
        rows = []
        for shard in (shard for shard in self.files if shard.file.endswith(".jsonl")):
            try:
                rows += [parse_object(line) for line in _read(self.folder, shard).splitlines()]
            except ValueError as error:
                raise UserError(f"{self.folder / shard.file}: {error}; the record is damaged") from error
        return sorted(rows, key=lambda row: (row["prompt_index"], row["sample_index"], row.get("branch", 0)))


def read_record(folder: str | Path) -> Record:
    """Read a record's tensors. Raises UserError unless the folder is a whole record."""
    folder = Path(folder)
    path = folder / RECORD_FILE
    if not path.is_file():
        raise UserError(f"{folder}: is not a record: no {RECORD_FILE}; give a folder as RUN/records/step_000001")
    description, files, dtypes = parse(read_file(path, MAX_RECORD_BYTES), path)
    names = [name for name in TENSORS if name in dtypes]
    shards = [_shard(folder, file) for file in files if file.file.endswith(".safetensors")]
    for name in names:
        if not shards or any(name not in shard for shard in shards):
            raise UserError(f"{folder}: a file has no {name}, which {RECORD_FILE} lists; the record is damaged")
    joined = {name: _joined([shard[name] for shard in shards]) for name in names}
    keys = ("branch", "sample_index", "prompt_index")
    order = np.lexsort(tuple(joined[name] for name in keys if name in joined))
    return Record(folder, description, {name: tensor[order] for name, tensor in joined.items()}, tuple(files))


def _shard(folder: Path, shard: Shard) -> dict[str, Array]:
    """Return the tensors of one replica's rows. Raises UserError for a damaged file."""
    path = folder / shard.file
    data = _read(folder, shard)
    tensors = {}
    for name, entry in read_entries(path).items():
        if name not in TENSORS or entry.dtype not in _DTYPES or entry.shape[:1] != (shard.rows,):
            raise UserError(f"{path}: {name} {entry.dtype} {list(entry.shape)} does not fit a record; it is damaged")
        count = int(np.prod(entry.shape))
        flat: Array = np.frombuffer(data, dtype=_DTYPES[entry.dtype], count=count, offset=entry.offset)
        tensors[name] = flat.reshape(entry.shape)
    return tensors


def _read(folder: Path, shard: Shard) -> bytes:
    """Return the bytes of a file. Raises UserError if they differ from the written ones."""
    path = folder / shard.file
    data = read_file(path, shard.nbytes)
    if len(data) != shard.nbytes or hashlib.sha256(data).hexdigest() != shard.sha256:
        raise UserError(f"{path}: differs from the file that was written, by its checksum; the record is damaged")
    return data


def _joined(parts: Sequence[Array]) -> Array:
    """Return the rows of all replicas, padded with zeros to the widest."""
    width = max((part.shape[1] for part in parts if part.ndim > 1), default=0)
    widened = [
        np.pad(part, [(0, 0), (0, width - part.shape[1]), *[(0, 0)] * (part.ndim - 2)])
        if part.ndim > 1 and part.shape[1] < width
        else part
        for part in parts
    ]
    return np.concatenate(widened)
