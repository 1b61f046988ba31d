"""Fill a live Megatron-Core model from a Hugging Face checkpoint; ranks read their own slices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.families import FAMILIES
from mega_rl.converters.families.deepseek import MTP_REPEATED
from mega_rl.converters.hf.config import text_config
from mega_rl.converters.hf.untabled import FOREIGN, config_of, table_of
from mega_rl.converters.live.adapters import add_stored, incomplete
from mega_rl.converters.live.copying import BlockReader, blocks_of, fill_all
from mega_rl.converters.plan.parameters import as_on_disk, disk_tensors, hf_tensors, ignored_tensors, outside
from mega_rl.converters.plan.proof import prove_complete
from mega_rl.converters.plan.ranks import ParamPlan, build_plan
from mega_rl.converters.plan.sharding import Head, Sharding
from mega_rl.converters.safetensors.header import matrix_shape
from mega_rl.converters.safetensors.quantised import SCALE_SUFFIX
from mega_rl.converters.safetensors.reader import DTYPE_NAMES, CheckpointReader, same_bits
from mega_rl.errors import UserError, UserErrors
from mega_rl.parallel.accelerator.megatron_core import stable_name
from mega_rl.parallel.layout import RankCoordinates
from mega_rl.untrusted import parse_object

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def model_config(path: Path) -> PreTrainedConfig:
    """Return transformers' config of a checkpoint's language model, without quantisation: weights come decoded.

    Raises UserError: no config.json is there, or transformers does not know the model.
    """
    try:
        described = dict(text_config(parse_object((path / "config.json").read_bytes())))
        family = FAMILIES.get(described["model_type"])
        config = config_of(described | {"model_type": family.transformers_type} if family else described)
    except (OSError, *FOREIGN) as error:
        raise UserError(f"{path}: transformers cannot read its config.json: {error}") from error
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


@dataclass(frozen=True)
class LoadReport:
    """Report of loading on this rank."""

    bytes_read: int  # this rank's share of the checkpoint
    kept_init: tuple[str, ...]  # parameters that the checkpoint has nothing for: a fresh value head
    ignored: tuple[str, ...]  # tensors of the checkpoint left aside by name
    seconds: float

    def __str__(self) -> str:
        """Return "1.19 GB of weights in 4.1 s", and what is new in the model."""
        new = f"; new, not in the checkpoint: {', '.join(self.kept_init)}" if self.kept_init else ""
        size = f"{self.bytes_read / 1e9:.2f} GB" if self.bytes_read >= 10**8 else f"{self.bytes_read / 1e6:.2f} MB"
        return f"{size} of weights in {self.seconds:.1f} s{new}"


def load_hf(
    chunks: Sequence[nn.Module],
    path: str | Path,
    *,
    sharding: Sharding,
    coordinates: RankCoordinates,
) -> LoadReport:
    """Copy this rank's part of the checkpoint into `chunks`, one unwrapped GPTModel per virtual pipeline stage.

    Values are cast to each parameter's dtype. No collectives: ranks load independently, each taking the bytes of its
    own parameters and no others (`CheckpointReader.bytes_read` counts them). The output layer of a tied model that
    spans several stages is filled from the embedding's tensor. Beyond the parameters it needs at most 12 MiB per
    thread.

    Raises UserErrors, the same on every rank and before any weight is read, that lists every missing, unexpected and
    mis-shaped tensor, and every reason why the model cannot be cut into `layout`.
    """
    layout = sharding.layout
    assert len(chunks) == layout.vpp, f"{len(chunks)} chunks, the layout has vpp={layout.vpp}"
    sharding.check()
    start = perf_counter()
    with CheckpointReader(path) as reader:
        hf = as_on_disk(sharding.hf, {name: info.shape for name, info in reader.tensors.items()})
        sharding = replace(sharding, hf=hf)
        prove_complete(sharding)
        add_stored(reader, hf.adapter)
        ignored, absent = check_tensors(reader, hf, sharding.head)
        jobs: list[tuple[ParamPlan, Tensor]] = []
        for vp_stage, chunk in enumerate(chunks):
            plan = build_plan(sharding, coordinates, vp_stage=vp_stage)
            params = weights_of(chunk)
            _assert_covers(plan, params)
            # Megatron-Core counts layers from 1.
            numbers = [layer.layer_number for layer in chunk.get_submodule("decoder.layers").children()]
            layers = layout.layers_of(coordinates.pp_rank, hf.num_layers, vp_stage)
            assert numbers == [i + 1 for i in layers], f"layers of the chunk are numbered {numbers}, planned: {layers}"
            jobs += [(param, params[param.name]) for param in plan]
        kept = [param.name for param, _ in jobs if any(copy.hf_name in absent for copy in param.copies)]
        jobs = [job for job in jobs if job[0].name not in kept]
        written = fill_all([(target, param.copies) for param, target in jobs], reader)
        expected = sum(prod(param.shape) for param, _ in jobs)
        assert written == expected, f"{written} elements were written, the parameters have {expected}"
        return LoadReport(reader.bytes_read, tuple(kept), ignored, perf_counter() - start)


def check_tensors(
    reader: CheckpointReader, hf: HFConfig, head: Head, *, allow_missing: Sequence[str] = ()
) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return (ignored tensors, absent tensors of the model) of a checkpoint that fits the config.

    `hf` as it is on disk (`as_on_disk`). Reads the bias of a value head, and tensors that must repeat others, if they
    are there. Raises UserErrors with everything that is missing and may not be, is not part of the model, has another
    shape or type, or would be left out although it holds other values (`repeat_faults`).
    """
    expected, ignorable = hf_tensors(hf, head=head), ignored_tensors(hf, head=head)
    problems, absent = [], set()
    for name, (shape, optional, _) in expected.items():
        info = reader.tensors.get(name)
        if optional and (info is None or info.shape != shape):
            absent.add(name)
        elif info is None:
            if any(fnmatchcase(name, pattern) for pattern in allow_missing):
                absent.add(name)
            else:
                hint = "set tie_word_embeddings in config.json if the output layer is the embedding"
                end = f"; {hint}" if name == _HEAD else ""
                problems.append(f"{reader.path}: {name} is missing, expected shape {list(shape)}{end}")
        elif info.shape != shape:
            problems.append(f"{info.file}: {name} has shape {list(info.shape)}, config.json asks for {list(shape)}")
        elif info.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            fault = f"and no {name}{SCALE_SUFFIX}; fetch the file again"
            problems.append(f"{info.file}: {name} has dtype {DTYPE_NAMES[info.dtype]} {fault}")
        elif info.dtype not in _WEIGHT_DTYPES:
            names = ", ".join(DTYPE_NAMES[dtype] for dtype in _WEIGHT_DTYPES)
            rule = f"must be one of {names}; other quantised weights cannot be loaded"
            problems.append(f"{info.file}: {name} has dtype {DTYPE_NAMES[info.dtype]}, {rule}")
    packed = [(info.name, info.packed.kind) for info in reader.tensors.values() if info.packed is not None]
    if foreign := [kind for _, kind in packed if kind != hf.quantization]:
        what = f"{len(foreign)} tensors ({packed[0][0]}, ...) are {foreign[0]} with scales"
        problems.append(f"{reader.path}: {what}, but config.json has no {foreign[0]} quantization_config")
    present = set(reader.tensors)
    if head == "value":
        bias = hf.value_head.removesuffix("weight") + "bias"
        if bias in present and reader.read(bias).any():
            fix = "the value head has no bias; fold it into the rewards, or set it to 0"
            problems.append(f"{reader.tensors[bias].file}: {bias} is not zero, and {fix}")
        present.discard(bias)
    # Tensors outside are not judged: all that the language model needs is looked for by name.
    present -= outside(hf, present, reader.others) - expected.keys()
    unexpected = present - set(expected) - ignorable
    # Only a score head may have another shape: a reward model scores several labels, a critic has one value.
    ignored = tuple(sorted(present - set(expected) - unexpected | (present & absent)))
    problems += [
        f"{info.file}: {info.name} {list(info.shape)} is not part of the {hf.family} model of config.json"
        for info in (reader.tensors[name] for name in sorted(unexpected))
    ]
    problems += incomplete(hf.adapter, absent)
    problems = problems or [f"{reader.path}: {fault}" for fault in repeat_faults(reader, hf, head)]
    if problems:
        raise UserErrors(problems)
    return ignored, frozenset(absent)


def repeat_faults(reader: BlockReader, hf: HFConfig, head: Head) -> list[str]:
    """Return a line for each tensor left out as a copy though its values differ.

    Copies are a tied output layer, and embedding and head inside prediction layers that are loaded. Reads both tensors
    if a copy is there, and nothing otherwise.
    """
    return [
        f"{name} {list(reader.tensors[name].shape)} differs from {original}, {why}"
        for name, original, why in _repeats(hf, head)
        if name in reader.tensors and original in reader.tensors and not _same(reader, name, original)
    ]


def _repeats(hf: HFConfig, head: Head) -> Iterator[tuple[str, str, str]]:
    """Yield (copy, original, why the copy must be equal and what to do)."""
    if hf.own is None and hf.tied and head == "lm":
        yield (
            _HEAD,
            _EMBEDDING,
            "yet tie_word_embeddings=true in config.json makes them one; set it to false to use the file's output "
            "layer, or delete that tensor from the file to use the embedding",
        )
    if hf.mtp == "load" and FAMILIES[hf.family].mtp_ignored:
        for layer in range(hf.num_layers, hf.num_layers + hf.mtp_layers):
            for name, original in zip(MTP_REPEATED, (_EMBEDDING, _EMBEDDING if hf.tied else _HEAD), strict=True):
                why = "and Megatron-Core has one tensor for both; drop the multi-token prediction layers (mtp=drop)"
                yield name.format(layer=layer), original, why


def _same(reader: BlockReader, name: str, original: str) -> bool:
    """Return whether two tensors have equal shapes and, in the wider dtype, equal bits."""
    one, other = reader.tensors[name], reader.tensors[original]
    if one.shape != other.shape:
        return False
    wider = max(one.dtype, other.dtype, key=lambda dtype: dtype.itemsize)
    return all(
        same_bits(reader.read_block(name, *block).to(wider), reader.read_block(original, *block).to(wider))
        for block in blocks_of(one)
    )


def weights_of(chunk: nn.Module) -> dict[str, Tensor]:
    """Return a model chunk's tensors of checkpoints by name: parameters and routers' expert biases."""
    buffers = {name: buffer for name, buffer in chunk.named_buffers() if name.endswith(".router.expert_bias")}
    return {stable_name(name): tensor for name, tensor in {**dict(chunk.named_parameters()), **buffers}.items()}


def weights_on_disk(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return every weight by its name on disk; experts are views into the model's tensors.

    A tied head and the embedding are one storage under two names.
    """
    weights: dict[str, Tensor] = {}
    own = None if model.config.model_type in FAMILIES else table_of(model)
    for name, tensor in model.state_dict(keep_vars=False).items():
        matrix = tensor.view(matrix_shape(tuple(tensor.shape)))
        for disk in disk_tensors(model.config.model_type, name, tuple(tensor.shape), own):
            weights[disk.name] = matrix[disk.row : disk.row + disk.rows].view(disk.shape)
    return weights


def _assert_covers(plan: Sequence[ParamPlan], params: dict[str, Tensor]) -> None:
    """Assert that plan and model agree on names and shapes."""
    planned = {param.name: param.shape for param in plan}
    faults = [f"{name} is in the model only" for name in params if name not in planned]
    for name, shape in planned.items():
        if name not in params:
            faults.append(f"{name} is in the plan only")
        elif tuple(params[name].shape) != shape:
            faults.append(f"{name} has shape {list(params[name].shape)}, the plan says {list(shape)}")
    assert not faults, "model and plan differ: " + "; ".join(faults)
