"""Export: what comes out of a model is what went in, bit for bit, on one rank, many simulated and four real ones."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.hf.companions import MOST_BYTES, companions, copy_companions, not_copied
from mega_rl.converters.hf.config import parse_hf_config, read_hf_config
from mega_rl.converters.live.export import ModelPlace, buckets, export_hf
from mega_rl.converters.live.load import load_hf
from mega_rl.converters.live.save import SaveOptions, save_hf
from mega_rl.converters.plan.export import export_plan
from mega_rl.converters.plan.sharding import Head, Sharding
from mega_rl.errors import UserError
from mega_rl.parallel.layout import ParallelLayout, RankCoordinates
from tests.helpers.distributed import run_ranks
from tests.helpers.models import write_tiny_checkpoint
from tests.unit_tests.converters.fakes import LAYOUTS, State, chunks_of_rank, groups_of, hf_state, small_config
from tests.unit_tests.converters.tiny_configs import TINY

FIRST = RankCoordinates(tp_rank=0, cp_rank=0, dp_rank=0, pp_rank=0)


def test_buckets_are_bounded_and_few() -> None:
    hf, layout = small_config(), LAYOUTS["tp2-pp2"]
    plan = export_plan(Sharding(hf, layout))
    actual = list(buckets(plan, bucket_bytes=4000, itemsize=4))
    assert [p for bucket in actual for p in bucket] == list(plan)
    for bucket in actual:
        assert len({p.pp_rank for p in bucket}) == 1
        assert len(bucket) == 1 or sum(p.numel for p in bucket) * 4 <= 4000
    # Large buckets: one per pipeline rank.
    assert len(list(buckets(plan, bucket_bytes=1 << 30, itemsize=4))) == 2


@pytest.mark.parametrize("ep", [1, 2, 8])
def test_what_is_gathered_at_once_does_not_grow_with_the_ranks_that_gather(ep: int) -> None:
    """An expert comes from its holders alone; where one tensor holds all experts, so does one unit."""
    hf, layout = parse_hf_config(TINY["qwen3_moe"] | {"num_experts": 8}), ParallelLayout(world_size=ep, ep=ep)
    expert = 3 * hf.hidden_size * hf.moe.ffn_hidden_size * 4 if hf.moe is not None else 0
    actual = list(buckets(export_plan(Sharding(hf, layout)), bucket_bytes=2 * expert, itemsize=4))
    of_experts = [bucket for bucket in actual if bucket[0].of_experts]
    assert of_experts
    for bucket in of_experts:
        (holders,) = {unit.holders for unit in bucket}
        assert len(holders) * sum(unit.numel for unit in bucket) * 4 <= 2 * expert
        assert {piece.member for unit in bucket for _, _, pieces in unit.tensors for piece in pieces} <= set(holders)
    if ep > 1:
        fused = export_plan(Sharding(parse_hf_config(TINY["gpt_oss"]), ParallelLayout(world_size=2, ep=2)))
        assert {unit.holders for unit in fused if unit.of_experts} == {range(2)}


def one_rank(hf: HFConfig, state: State, *, head: Head = "lm") -> tuple[list[nn.Module], State]:
    chunks = chunks_of_rank(hf, state, LAYOUTS["one"], FIRST, fill=None)
    return chunks, dict(export_hf(chunks, ModelPlace(Sharding(hf, head=head))))


def test_tensors_belong_to_the_consumer() -> None:
    hf = small_config()
    state = hf_state(hf)
    chunks, exported = one_rank(hf, state)
    with torch.no_grad():
        for param in chunks[0].parameters():
            param.zero_()
    for name, tensor in exported.items():
        assert torch.equal(tensor, state[name])
        assert tensor.is_contiguous()
        assert not tensor.requires_grad


# Checkpoints as transformers writes them.


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=["bf16"])
def test_round_trip_of_a_real_checkpoint(tmp_path: Path, family: str, tied: bool, dtype: torch.dtype) -> None:
    """A file or shards of transformers -> one rank -> disk -> transformers, bit for bit."""
    from transformers import AutoModelForCausalLM

    source = write_tiny_checkpoint(tmp_path / "hf", family=family, tied=tied, dtype=dtype)
    original = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    resharded = tmp_path / "sharded"
    original.save_pretrained(resharded, max_shard_size="20KB")
    assert len(list(resharded.glob("*.safetensors"))) > 2
    hf = read_hf_config(source)
    assert read_hf_config(resharded) == hf
    empty = {name: torch.zeros_like(tensor, dtype=dtype) for name, tensor in hf_state(hf).items()}
    one = chunks_of_rank(hf, empty, LAYOUTS["one"], FIRST)
    load_hf(one, resharded, sharding=Sharding(hf), coordinates=FIRST)
    place = ModelPlace(Sharding(hf))
    save_hf(one, tmp_path / "out", source=source, place=place, options=SaveOptions(shard_bytes=20_000))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype).state_dict()
    assert all(same(again[name], t) for name, t in original.state_dict().items())
    assert again.keys() == original.state_dict().keys()
    assert (tmp_path / "out/config.json").read_bytes() == (source / "config.json").read_bytes()
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == again.keys() - ({"lm_head.weight"} if tied else set())


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def test_companions(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json"):
        companions(tmp_path)
    copied = ["config.json", "merges.txt", "chat_template.jinja", "tokenizer.model", "tokenizer.model.v3", "README.md"]
    copied += ["additional_chat_templates/tool_use.jinja"]
    weights = ["model.safetensors", "model.safetensors.index.json", "sub/model.safetensors"]
    left = ["pytorch_model.bin", "modeling_x.py", "run.sh", "adapter_config.json", "adapter_model.bin", "sub/a.pth"]
    hidden = [".gitattributes", ".cache/note.txt", "sub/.netrc", "sub/deep/er.json"]
    for name in copied + weights + left + hidden:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(name)
    os.mkfifo(tmp_path / "vocab.txt")
    with (tmp_path / "experts.raw").open("wb") as large:
        large.truncate(MOST_BYTES + 1)
    files = companions(tmp_path)
    assert sorted(files) == sorted(copied)
    assert not_copied(tmp_path, files) == f"; not copied from {tmp_path}: {', '.join(sorted([*left, 'experts.raw']))}"
    copy_companions(tmp_path / ".cache", {name: files[name] for name in copied}, {})
    assert (tmp_path / ".cache" / copied[-1]).read_text() == copied[-1]


@pytest.mark.parametrize("link", ["LICENSE", "extra", "chain.txt", "config.json"])
def test_links_out_of_a_model_folder_are_refused(tmp_path: Path, link: str) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key.txt").write_text("secret")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / ".hop").symlink_to("../secret/key.txt")
    targets = {"extra": secret, "chain.txt": Path(".hop")}
    (model / link).unlink(missing_ok=True)
    (model / link).symlink_to(targets.get(link, secret / "key.txt"))
    with pytest.raises(UserError, match=rf"{link}.*a link to {secret}/key\.txt, outside of the model's folder"):
        companions(model)


def test_links_inside_a_folder_and_into_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    repository = tmp_path / "models--a--b"
    snapshot, blobs = repository / "snapshots" / "1f", repository / "blobs"
    for folder in (snapshot / "additional_chat_templates", blobs):
        folder.mkdir(parents=True)
    for blob in ("aa", "bb"):
        (blobs / blob).write_text(blob)
    (snapshot / "config.json").symlink_to("../../blobs/aa")
    (snapshot / "additional_chat_templates" / "rag.jinja").symlink_to("../../../blobs/bb")
    (snapshot / "copy.json").symlink_to("config.json")
    names = ["additional_chat_templates/rag.jinja", "config.json", "copy.json"]
    assert {name: path.read_text() for name, path in companions(snapshot).items()} == dict(
        zip(names, ("bb", "aa", "aa"), strict=True)
    )
    (tmp_path / "models--c--d" / "blobs").mkdir(parents=True)
    (tmp_path / "models--c--d" / "blobs" / "cc").write_text("cc")
    (snapshot / "x.json").symlink_to("../../../models--c--d/blobs/cc")
    with pytest.raises(UserError, match=r"x\.json"):
        companions(snapshot)


# Four processes with gloo groups.

FOUR_RANKS = {
    "tp4": ParallelLayout(world_size=4, tp=4),
    "tp2-pp2-vpp2": ParallelLayout(world_size=4, tp=2, pp=2, vpp=2),
    "pp2-dp2": ParallelLayout(world_size=4, pp=2),
}


def export_on_four_ranks(rank: int, folder: str) -> list[str]:
    """What this rank found wrong."""
    dist.init_process_group("gloo")
    faults = []
    made = {name: groups_of(layout, rank) for name, layout in FOUR_RANKS.items()}
    cases = itertools.product(FOUR_RANKS.items(), [(False, torch.bfloat16), (True, torch.float32)])
    for (name, layout), (tied, dtype) in cases:
        hf = small_config(tied=tied, qkv_bias=tied, family="qwen2" if tied else "qwen3")
        state = hf_state(hf, dtype=dtype)
        at = layout.coordinates(rank)
        chunks = chunks_of_rank(hf, state, layout, at, fill=None)
        place = ModelPlace(Sharding(hf, layout), at, **made[name])
        for bucket_bytes in (500, 1 << 20):
            stream = list(export_hf(chunks, replace(place, bucket_bytes=bucket_bytes)))
            exported = dict(stream)
            if [n for n, _ in stream] != list(state):
                faults.append(f"{name} tied={tied}: names")
            faults += [f"{name} tied={tied}: {n}" for n, t in state.items() if not same(exported[n], t)]
        own = dict(export_hf(chunks, replace(place, bucket_bytes=500), own_stage=True))
        units = [unit for unit in export_plan(place.sharding) if unit.pp_rank == at.pp_rank]
        if list(own) != [n for unit in units for n, _, _ in unit.tensors]:
            faults.append(f"{name} tied={tied}: names of the own stage")
        faults += [f"{name} tied={tied}: {n} of the own stage" for n, t in own.items() if not same(t, state[n])]
        out = Path(folder) / f"{name}-{tied}"
        save_hf(chunks, out, source=folder, place=place)
        dist.barrier()
        if not (out / "model.safetensors").is_file():
            faults.append(f"{name} tied={tied}: nothing written")
    return faults


def test_four_ranks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert run_ranks(4, export_on_four_ranks, str(tmp_path), device="cpu") == [[], [], [], []]
