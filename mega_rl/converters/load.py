"""Fills a live Megatron-Core model from a Hugging Face checkpoint; every rank reads its own slices, nobody else's."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor, nn

from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.blocks import Copy, matrix_shape
from mega_rl.converters.plan import Head, ParamPlan, Sharding, as_on_disk, build_plan, hf_tensors, ignored_tensors
from mega_rl.converters.proof import prove_complete
from mega_rl.converters.safetensors_io import CheckpointReader
from mega_rl.errors import UserErrors
from mega_rl.parallel.layout import RankCoordinates

logger = logging.getLogger(__name__)

_WEIGHT_DTYPES = ("BF16", "F16", "F32", "F64")


@dataclass(frozen=True)
class LoadReport:
    """What loading did on this rank."""

    num_params: int  # parameters filled
    bytes_read: int  # of the checkpoint, by this rank
    kept_init: tuple[str, ...]  # parameters that the checkpoint has nothing for: a fresh value head
    ignored: tuple[str, ...]  # tensors of the checkpoint left aside by name


def load_hf(
    chunks: Sequence[nn.Module],
    path: str | Path,
    *,
    sharding: Sharding,
    coordinates: RankCoordinates,
) -> LoadReport:
    """Copies this rank's part of the checkpoint into `chunks`, one unwrapped GPTModel per virtual pipeline stage.

    Values are cast to each parameter's dtype. No collectives: ranks load independently. The output layer of a tied
    model that spans several stages is filled from the embedding's tensor. A row-cut or whole parameter costs exactly
    its own bytes; a column-cut one costs the whole tensor (see CheckpointReader.read_block).

    Raises UserErrors, the same on every rank and before any data is read, that lists every missing, unexpected and
    mis-shaped tensor, and every reason why the model cannot be cut into `layout`.
    """
    layout = sharding.layout
    assert len(chunks) == layout.vpp, f"{len(chunks)} chunks, the layout has vpp={layout.vpp}"
    with CheckpointReader(path) as reader:
        hf = as_on_disk(sharding.hf, {name: info.shape for name, info in reader.tensors.items()})
        sharding = replace(sharding, hf=hf)
        prove_complete(sharding)
        ignored, absent = _check_tensors(reader, hf, sharding.head)
        jobs: list[tuple[ParamPlan, Tensor]] = []
        for vp_stage, chunk in enumerate(chunks):
            plan = build_plan(sharding, coordinates, vp_stage=vp_stage)
            params = weights_of(chunk)
            _assert_covers(plan, params)
            _assert_layer_numbers(chunk, layout.layers_of(coordinates.pp_rank, hf.num_layers, vp_stage))
            jobs += [(param, params[param.name]) for param in plan]
        kept = [param.name for param, _ in jobs if _is_absent(param, absent)]
        jobs = [job for job in jobs if not _is_absent(job[0], absent)]
        # In the order of the files, so that a cold disk is read forwards.
        jobs.sort(key=lambda job: _position(job[0], reader))
        with torch.no_grad():
            for param, target in jobs:
                _fill(target, param.copies, reader)
        report = LoadReport(len(jobs), reader.bytes_read, tuple(kept), ignored)
    if kept:
        logger.info("%s: has no weights for %s, which keep their initial values", path, ", ".join(kept))
    return report


def _check_tensors(reader: CheckpointReader, hf: HFConfig, head: Head) -> tuple[tuple[str, ...], frozenset[str]]:
    """(tensors left aside, optional tensors that are not there) of a checkpoint that fits the config."""
    expected, ignorable = hf_tensors(hf, head=head), ignored_tensors(hf, head=head)
    problems, absent = [], set()
    for name, (shape, optional, _) in expected.items():
        info = reader.tensors.get(name)
        if optional and (info is None or info.shape != shape):
            absent.add(name)
        elif info is None:
            problems.append(f"{reader.path}: {name} is missing, expected shape {list(shape)}{_missing_hint(name)}")
        elif info.shape != shape:
            problems.append(f"{info.file}: {name} has shape {list(info.shape)}, config.json asks for {list(shape)}")
        elif info.dtype not in _WEIGHT_DTYPES:
            rule = f"must be one of {', '.join(_WEIGHT_DTYPES)}; quantised weights cannot be loaded"
            problems.append(f"{info.file}: {name} has dtype {info.dtype}, {rule}")
    present = set(reader.tensors)
    unexpected = present - set(expected) - ignorable
    # The one tensor with a shape of its own choice: a reward model may score several labels, a critic has one value.
    ignored = tuple(sorted((present & ignorable) | (present & absent)))
    problems += [
        f"{info.file}: {info.name} {list(info.shape)} is no part of the {hf.model_type} model of config.json"
        for info in (reader.tensors[name] for name in sorted(unexpected))
    ]
    if problems:
        raise UserErrors(problems)
    if ignored:
        logger.info("%s: left aside %s", reader.path, _shorten(ignored))
    return ignored, frozenset(absent)


def _missing_hint(name: str) -> str:
    if name == "lm_head.weight":
        return "; set tie_word_embeddings in config.json if the output layer is the embedding"
    return ""


def _shorten(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _is_absent(param: ParamPlan, absent: frozenset[str]) -> bool:
    return any(copy.hf_name in absent for copy in param.copies)


def _position(param: ParamPlan, reader: CheckpointReader) -> tuple[str, int]:
    """(file, offset) of a parameter's first source; padding alone comes first."""
    names = [copy.hf_name for copy in param.copies if copy.hf_name is not None]
    if not names:
        return "", 0
    info = reader.tensors[names[0]]
    return str(info.file), info.offset


def _fill(target: Tensor, copies: Iterable[Copy], reader: CheckpointReader) -> None:
    """Writes one parameter: copies that continue each other on disk are one read."""
    matrix = target.detach().view(matrix_shape(tuple(target.shape)))
    for c in copies:
        if c.hf_name is None:
            _rectangle(matrix, c).zero_()
        elif c.transposed:
            height, width = c.src_shape
            block = reader.read_block(c.hf_name, (c.src_row, c.src_row + height), (c.src_col, c.src_col + width))
            _rectangle(matrix, c).copy_(block[:, :: c.step].T)
    straight = (c for c in copies if c.hf_name is not None and not c.transposed)
    by_tensor = sorted(straight, key=lambda c: (c.hf_name, c.src_row))
    for name, group in groupby(by_tensor, key=lambda c: c.hf_name):
        assert name is not None
        for run in _runs(group):
            first, last = run[0], run[-1]
            rows, cols = (first.src_row, last.src_row + last.rows), (first.src_col, first.src_col + first.cols)
            # One transfer for the whole run; its parts are then put in place where the parameter lives.
            block = reader.read_block(name, rows, cols).to(target.device)
            for c in run:
                source = block[c.src_row - rows[0] : c.src_row - rows[0] + c.rows]
                _rectangle(matrix, c).copy_(source)


def _rectangle(matrix: Tensor, copy: Copy) -> Tensor:
    """The part of a parameter that a copy writes."""
    return matrix[copy.dst_row : copy.dst_row + copy.rows, copy.dst_col : copy.dst_col + copy.cols]


def _runs(copies: Iterable[Copy]) -> list[list[Copy]]:
    """Copies of one tensor, sorted by row, in groups whose source rows are consecutive."""
    runs: list[list[Copy]] = []
    for copy in copies:
        before = runs[-1][-1] if runs else None
        joined = before and before.src_row + before.rows == copy.src_row
        if before and joined and (before.src_col, before.cols) == (copy.src_col, copy.cols):
            runs[-1].append(copy)
        else:
            runs.append([copy])
    return runs


def weights_of(chunk: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint holds of a model chunk by name: its parameters, and the routers' expert biases (buffers)."""
    buffers = {name: buffer for name, buffer in chunk.named_buffers() if name.endswith(".router.expert_bias")}
    return {**dict(chunk.named_parameters()), **buffers}


def _assert_covers(plan: Sequence[ParamPlan], params: dict[str, Tensor]) -> None:
    """The plan and the model agree on names and shapes; anything else is a bug of the plan or of the model's spec."""
    planned = {param.name: param.shape for param in plan}
    faults = [f"{name} is in the model only" for name in params if name not in planned]
    for name, shape in planned.items():
        if name not in params:
            faults.append(f"{name} is in the plan only")
        elif tuple(params[name].shape) != shape:
            faults.append(f"{name} has shape {list(params[name].shape)}, the plan says {list(shape)}")
    assert not faults, "model and plan differ: " + "; ".join(faults)


def _assert_layer_numbers(chunk: nn.Module, layers: range) -> None:
    """Megatron-Core's own numbering (from 1) of the chunk's layers is the one that the plan assumes."""
    numbers = [layer.layer_number for layer in chunk.get_submodule("decoder.layers").children()]
    expected = [layer + 1 for layer in layers]
    assert numbers == expected, f"layers of the chunk are numbered {numbers}, the plan says {expected}"
