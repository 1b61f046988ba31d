"""Distributed checkpoints against Megatron-Core itself, and damaged or hostile ones."""

from __future__ import annotations

import io
import itertools
import os
import pickle
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, MetadataIndex

from mega_rl.converters.hf.config import release_problems
from mega_rl.converters.offline import slabs
from mega_rl.converters.offline.checkpoint import open_checkpoint
from mega_rl.converters.offline.compare import compare
from mega_rl.converters.offline.convert import export_checkpoint, import_hf
from mega_rl.converters.offline.torch_dist import read_metadata
from mega_rl.converters.safetensors.header import matrix_shape
from mega_rl.converters.safetensors.reader import CheckpointReader
from mega_rl.errors import UserError
from tests.helpers.distributed import run_ranks
from tests.helpers.models import write_tiny_checkpoint
from tests.helpers.selection import FULL
from tests.unit_tests.converters.random_checkpoints import write_random

# family -> layouts by world size; sp wherever a model with experts or latent attention is cut.
WORLDS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"1": {}},
    2: {
        "tp2": {"tp": 2, "sequence_parallel": True},
        "pp2-vpp2": {"pp": 2, "vpp": 2},
        "uneven": {"pp": 2, "pipeline": (3, 1)},
        "ep2": {"ep": 2},
    },
}

# What the layout has with other models, and the model on other layouts: in `make test-full`.
FULL_ONLY = {
    ("pp2-vpp2", "qwen2_moe"), ("pp2-vpp2", "gpt_oss"), ("uneven", "qwen2_moe"), ("uneven", "qwen3_moe"),
    ("ep2", "qwen3_moe"),
}  # fmt: skip


def _weights(chunks: list[nn.Module]) -> list[dict[str, Tensor]]:
    from mega_rl.converters.live.load import weights_of

    return [{name: tensor.detach().clone() for name, tensor in weights_of(chunk).items()} for chunk in chunks]


def _sharded_state(chunks: list[nn.Module], dp_cp_group: Any) -> dict[str, Any]:
    keys = ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]
    metadata = {"dp_cp_group": dp_cp_group}
    return {key: chunk.sharded_state_dict(metadata=metadata) for key, chunk in zip(keys, chunks, strict=True)}


def _differing(chunks: list[nn.Module], expected: list[dict[str, Tensor]]) -> list[str]:
    return [
        f"{stage}.{name}"
        for stage, (actual, wanted) in enumerate(zip(_weights(chunks), expected, strict=True))
        for name in wanted
        if not torch.equal(actual[name], wanted[name])
    ]


def _spoil(chunks: list[nn.Module]) -> None:
    from mega_rl.converters.live.load import weights_of

    for chunk in chunks:
        for tensor in weights_of(chunk).values():
            tensor.data.fill_(float("nan"))


def load_and_save(rank: int, root: str, world_size: int, models: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """Names that differ, by what was done: loading offline conversions into live models, and saving those.

    `root`/{name} holds for every model its Hugging Face checkpoint `hf` and `dist`; live models
    are saved into `saved-{layout}`. A rank on a CPU that forks is named, too: see tests/helpers/upstream_writers.py.
    """
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    from megatron.core import dist_checkpointing

    from mega_rl.parallel import groups
    from mega_rl.parallel.layout import ParallelLayout
    from tests.helpers.loaded_model import load_model

    actual: dict[str, list[str]] = {}
    forks: list[str] = []
    os.register_at_fork(before=lambda: forks.append("a process forked beside threads of gloo"))
    for layout, sizes in WORLDS[world_size].items():
        built = groups.initialize(ParallelLayout(world_size=world_size, **sizes), accelerator=accelerator, timeout_s=60)
        groups.seed_model_parallel(1, built)
        for name, model in models.items():
            if (layout == "ep2" and not model["moe"]) or (not FULL and (layout, name) in FULL_ONLY):
                continue
            folder = Path(root) / name
            live = load_model(folder / "hf", groups=built, accelerator=accelerator, dtype="fp32", mtp=model["mtp"])
            expected = _weights(live.chunks)
            _spoil(live.chunks)
            state = dist_checkpointing.load(_sharded_state(live.chunks, built.collection.dp_cp), str(folder / "dist"))
            for key, chunk in zip(
                sorted(_sharded_state(live.chunks, built.collection.dp_cp)), live.chunks, strict=True
            ):
                chunk.load_state_dict(state[key])
            actual[f"{name} {layout} dist_checkpointing.load"] = _differing(live.chunks, expected)
            saved = folder / f"saved-{layout}"
            saved.mkdir(exist_ok=True)
            dist_checkpointing.save(_sharded_state(live.chunks, built.collection.dp_cp), str(saved))
        groups.destroy()
    actual["forks"] = forks if accelerator.name == "cpu" else []
    return actual


def load_critic(rank: int, policy: str, dist: str) -> dict[str, Tensor]:
    """The weights of a critic's engine that has loaded an offline conversion, by name on disk."""
    from tests.helpers.engines import exported, make_config, running_engine

    with running_engine(make_config(Path(policy), layout="1"), head="value", trainable=False) as engine:
        from megatron.core import dist_checkpointing

        state = _sharded_state(engine.models, engine.groups.collection.dp_cp)
        engine.models[0].load_state_dict(dist_checkpointing.load(state, dist)["model"])
        return exported(engine)


MODELS: dict[str, dict[str, Any]] = {
    "qwen3-tied": {"family": "qwen3", "tied": True, "vocab_size": 51},
    "qwen2_moe": {"family": "qwen2_moe", "tied": False},
    "qwen3_moe": {"family": "qwen3_moe", "tied": False, "decoder_sparse_step": 2, "vocab_size": 51},
    "deepseek_v3": {"family": "deepseek_v3", "tied": False, "mtp_layers": 1, "mtp": "load"},
    "gpt_oss": {"family": "gpt_oss", "tied": False},
    "apertus": {"family": "apertus", "tied": False},
}
if not any(release_problems("qwen3_next")):
    MODELS |= {family: {"family": family, "tied": False} for family in ("qwen3_next", "qwen3_5_text")}
# What prediction layers repeat on disk, and the model has once.
REPEATED = ("model.layers.4.embed_tokens.weight", "model.layers.4.shared_head.head.weight")


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of MODELS as transformers writes them (`hf`) and as `dist`."""
    root = tmp_path_factory.mktemp("dist")
    for name, model in MODELS.items():
        write_tiny_checkpoint(root / name / "hf", **{key: value for key, value in model.items() if key != "mtp"})
        import_hf(root / name / "hf", root / name / "dist", mtp=model.get("mtp", "drop"))
    return root


@pytest.mark.parametrize("world_size", WORLDS)
def test_megatron_and_converter_read_each_others_checkpoints(world_size: int, converted: Path) -> None:
    moe = {"qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next"}
    models = {name: {"moe": name in moe, "mtp": model.get("mtp", "drop")} for name, model in MODELS.items()}
    for actual in run_ranks(world_size, load_and_save, str(converted), world_size, models, timeout_s=240):
        assert {case: names for case, names in actual.items() if names} == {}
        assert len(actual) > len(MODELS)
    for name in MODELS:
        for layout in WORLDS[world_size]:
            saved = converted / name / f"saved-{layout}"
            if not saved.exists():
                continue
            back = converted / name / f"back-{layout}"
            report = export_checkpoint(saved, back, reference=converted / name / "hf")
            beside = [name for name in report.ignored if "extra states" not in name]
            assert set(beside) <= {"common_state/shard_0_1"}  # of Megatron-Core from 0.19 on
            with CheckpointReader(converted / name / "hf") as a, CheckpointReader(back) as b:
                assert compare(a, b, allow_missing=REPEATED).equal, (name, layout)


def test_megatron_critic_loads_value_head(tmp_path: Path) -> None:
    policy = write_random(tmp_path / "policy", "qwen3", dtype=torch.float32, seed=1)
    (policy / "tokenizer.json").unlink()  # which stands for any file beside the weights
    critic = write_random(tmp_path / "critic", "qwen3", dtype=torch.float32, head="value")
    import_hf(critic, tmp_path / "dist", head="value")
    for actual in run_ranks(1, load_critic, str(policy), str(tmp_path / "dist")):
        with CheckpointReader(critic) as reader:
            assert set(actual) == set(reader.tensors)
            assert all(torch.equal(actual[name], reader.read(name)) for name in actual)


def test_both_norm_names_and_stackings_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's local spec renames the norm before a mixture, and stacks layers that are all mixtures."""
    source = write_random(tmp_path / "hf", "qwen3_moe", mlp_only_layers=[])
    import_hf(source, tmp_path / "single")
    with monkeypatch.context() as patch:
        patch.setattr(slabs, "is_stacked", lambda hf: True)
        import_hf(source, tmp_path / "stacked")
    assert "decoder.layers.0.mlp.experts.experts.linear_fc1.weight" in read_metadata(tmp_path / "single")[0]
    assert "decoder.layers.mlp.experts.experts.linear_fc1.weight" in read_metadata(tmp_path / "stacked")[0]
    for name in ("single", "stacked"):
        folder = tmp_path / name
        metadata = FileSystemReader(folder).read_metadata()
        old, new = "pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"
        state, storage = metadata.state_dict_metadata, metadata.storage_data
        metadata.state_dict_metadata = {key.replace(old, new): entry for key, entry in state.items()}
        metadata.storage_data = {replace(i, fqn=i.fqn.replace(old, new)): place for i, place in storage.items()}
        assert metadata.state_dict_metadata.keys() != state.keys()
        export_checkpoint(folder, tmp_path / f"{name}-te")
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        export_checkpoint(folder, tmp_path / f"{name}-local")
        for dialect in ("te", "local"):
            with CheckpointReader(source) as a, CheckpointReader(tmp_path / f"{name}-{dialect}") as b:
                assert compare(a, b).equal, (name, dialect)


def test_chunks_across_layers_and_rows_are_read(tmp_path: Path) -> None:
    """Chunks as another program may cut them: layers in twos, rows in halves, columns in halves."""
    folder = small_checkpoint(tmp_path)
    weights = {}
    with open_checkpoint(folder) as checkpoint:
        for name, of in checkpoint.tensors.items():
            rows, columns = matrix_shape(of.shape)
            weights[name] = checkpoint.read_block(name, (0, rows), (0, columns)).view(of.shape)
    metadata = FileSystemReader(folder).read_metadata()
    file = (folder / "other.distcp").open("wb")
    for suffix in ("mlp.linear_fc2.weight", "self_attention.linear_qkv.bias"):
        key = f"decoder.layers.{suffix}"
        whole = torch.stack([weights[f"decoder.layers.{layer}.{suffix}"] for layer in range(4)])
        entry = metadata.state_dict_metadata[key]
        entry.chunks = []
        for index in [index for index in metadata.storage_data if index.fqn == key]:
            del metadata.storage_data[index]
        halves = [[(0, size // 2), (size // 2, size - size // 2)] for size in whole.shape]
        for box in itertools.product(*halves):
            offsets, sizes = (torch.Size(values) for values in zip(*box, strict=True))
            part = whole[tuple(slice(low, low + size) for low, size in box)].clone()
            start = file.tell()
            torch.save(part, file)
            entry.chunks.append(ChunkStorageMetadata(offsets, sizes))
            metadata.storage_data[MetadataIndex(key, offsets)] = _StorageInfo(
                "other.distcp", start, file.tell() - start
            )
    file.close()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    export_checkpoint(folder, tmp_path / "back")
    with CheckpointReader(tmp_path / "hf") as a, CheckpointReader(tmp_path / "back") as b:
        assert compare(a, b).equal


class Malicious:
    """Pickles into a call of os.system."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def small_checkpoint(folder: Path) -> Path:
    """An imported distributed checkpoint of a tiny qwen2."""
    source = write_random(folder / "hf", "qwen2")
    import_hf(source, folder / "dist")
    return folder / "dist"


def add_copy(metadata: Any, key: str, name: str) -> None:
    """A second tensor with the chunks of another."""
    metadata.state_dict_metadata[name] = metadata.state_dict_metadata[key]
    for index, info in list(metadata.storage_data.items()):
        if index.fqn == key:
            metadata.storage_data[replace(index, fqn=name)] = info


def refused(folder: Path) -> str:
    """The message with which opening a checkpoint fails; anything but a UserError passes through."""
    with pytest.raises(UserError) as caught:
        open_checkpoint(folder)
    return str(caught.value)


def test_pickle_that_runs_a_program_is_refused(tmp_path: Path) -> None:
    folder, trace = small_checkpoint(tmp_path), tmp_path / "trace"
    (folder / ".metadata").write_bytes(pickle.dumps(Malicious(f"touch {trace}")))
    message = refused(folder)
    assert "posix.system" in message
    assert str(folder / ".metadata") in message
    assert not trace.exists()


def test_chunk_that_runs_a_program_is_refused(tmp_path: Path) -> None:
    """The archive of a chunk is replaced in place by one of the same length whose description calls os.system."""
    folder, trace = small_checkpoint(tmp_path), tmp_path / "trace"
    tensors, _ = read_metadata(folder)
    chunk = max((chunk for tensor in tensors.values() for chunk in tensor.chunks), key=lambda chunk: chunk.length)

    def archive(padding: int) -> bytes:
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as file:
            file.writestr("archive/data.pkl", pickle.dumps(Malicious(f"touch {trace}"), protocol=2))
            file.writestr("archive/version", "3\n")
            file.writestr("archive/padding", b"x" * padding)
        return content.getvalue()

    with chunk.file.open("r+b") as file:
        file.seek(chunk.offset)
        file.write(archive(chunk.length - len(archive(0))))
    assert "posix.system" in refused(folder)
    assert not trace.exists()


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_pickle_cannot_change_or_call_allowed_names(protocol: int, tmp_path: Path) -> None:
    """Building state into a class itself, and calling an allowed name with anything."""
    folder = small_checkpoint(tmp_path)
    state = b"(N}U\x04argsU\x01xstb."
    for name in (b"torch.distributed.checkpoint.metadata\nMetadata\n", b"collections\nOrderedDict\n"):
        (folder / ".metadata").write_bytes(b"\x80\x02c" + name + state)
        assert "damaged" in refused(folder)
    (folder / ".metadata").write_bytes(pickle.dumps([torch.Size([1]), torch.float32, Path("x")], protocol))
    refused(folder)


def test_paths_of_the_metadata_stay_inside_the_folder(tmp_path: Path) -> None:
    folder = small_checkpoint(tmp_path)
    (tmp_path / "outside.distcp").write_bytes((folder / "__0_0.distcp").read_bytes())
    for name in ("../outside.distcp", str(tmp_path / "outside.distcp"), "sub/../../outside.distcp", "", "a\0b"):
        metadata = FileSystemReader(folder).read_metadata()
        for info in metadata.storage_data.values():
            info.relative_path = name
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        assert "inside the checkpoint" in refused(folder)


def test_damaged_metadata_and_chunks_are_user_errors(tmp_path: Path) -> None:
    """200 mutants of the metadata and 100 of the chunks: refused in words, or as harmless as they look."""
    folder = small_checkpoint(tmp_path)
    random = Random(0)
    for name, count in ((".metadata", 200), ("__0_0.distcp", 100), ("metadata.json", 20)):
        path = folder / name
        whole = path.read_bytes()
        for _ in range(count):
            mutant = bytearray(whole)
            if random.random() < 0.2:
                del mutant[random.randrange(len(mutant)) :]
            else:
                for _ in range(random.randint(1, 4)):
                    mutant[random.randrange(len(mutant))] = random.randrange(256)
            path.write_bytes(mutant)
            with suppress(UserError), open_checkpoint(folder) as checkpoint:
                assert len(checkpoint.tensors) == len(checkpoint.homes)
        path.write_bytes(whole)
    with open_checkpoint(folder):
        pass


def test_missing_chunks_and_foreign_tensors_are_named(tmp_path: Path) -> None:
    folder = small_checkpoint(tmp_path)
    reader = FileSystemReader(folder)

    def rewritten(change: Callable[[Any], None]) -> str:
        metadata = reader.read_metadata()
        change(metadata)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        return refused(folder)

    whole = (folder / ".metadata").read_bytes()
    key = "decoder.layers.mlp.linear_fc2.weight"
    assert "decoder.layers.2.mlp.linear_fc2.weight rows 0..40 are missed" in rewritten(
        lambda m: m.state_dict_metadata[key].chunks.pop(2)
    )
    (folder / ".metadata").write_bytes(whole)
    assert "decoder.layers.0.mlp.linear_fc2.weight is missing" in rewritten(lambda m: m.state_dict_metadata.pop(key))
    (folder / ".metadata").write_bytes(whole)
    assert "strange.weight is not part of the qwen2 model" in rewritten(lambda m: add_copy(m, key, "strange.weight"))


def test_training_state_is_ignored_and_reported(tmp_path: Path) -> None:
    folder = small_checkpoint(tmp_path)
    metadata = FileSystemReader(folder).read_metadata()
    key = "decoder.layers.mlp.linear_fc2.weight"
    extra = "optimizer.state.exp_avg." + key
    add_copy(metadata, key, extra)
    objects = {"rng_state/shard_0_1", "common_state/shard_0_1"}
    metadata.state_dict_metadata |= {name: BytesStorageMetadata() for name in objects}
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    report = export_checkpoint(folder, tmp_path / "back")
    assert {extra, *objects} <= set(report.ignored)
    with CheckpointReader(tmp_path / "hf") as a, CheckpointReader(tmp_path / "back") as b:
        assert compare(a, b).equal
