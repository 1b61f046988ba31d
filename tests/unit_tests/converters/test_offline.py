"""Conversion without a model: round trips of every family and layout, resharding, interruptions, bad inputs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mega_rl.converters.compare import compare
from mega_rl.converters.offline import export_checkpoint, import_hf, open_checkpoint, reshard
from mega_rl.converters.safetensors_io import CheckpointReader
from tests.unit_tests.converters.random_checkpoints import contents, layouts_of, write_random
from tests.unit_tests.converters.tiny_configs import TINY


def assert_same_weights(first: Path, second: Path) -> None:
    """Names, dtypes, shapes and every bit agree, and config.json, tokenizer and templates byte for byte."""
    with CheckpointReader(first) as a, CheckpointReader(second) as b:
        comparison = compare(a, b)
    assert comparison.equal, comparison
    beside = [{n: c for n, c in contents(folder).items() if "safetensors" not in n} for folder in (first, second)]
    assert beside[0] == beside[1]
    assert "config.json" in beside[0]


@pytest.mark.parametrize("family", TINY)
def test_every_family_and_layout_comes_back_bit_for_bit(family: str, tmp_path: Path) -> None:
    source = write_random(tmp_path / "hf", family)
    for name, layout in layouts_of(family).items():
        for spec in ("te", "local") if name == "tp2-pp2" else ("local",):
            stored = tmp_path / f"{name}-{spec}"
            report = import_hf(source, stored, layout=layout, format="ranks", spec=spec, mtp="load")
            assert not report.absent
            back = tmp_path / f"{name}-{spec}-hf"
            export_checkpoint(stored, back, shard_bytes=60_000)
            assert_same_weights(source, back)


@pytest.mark.parametrize("family", TINY)
def test_distributed_checkpoints_come_back_bit_for_bit(family: str, tmp_path: Path) -> None:
    source = write_random(tmp_path / "hf", family)
    stored, back = tmp_path / "dist", tmp_path / "back"
    import_hf(source, stored, layout=layouts_of(family)["tp2"], format="torch_dist", mtp="load")
    export_checkpoint(stored, back, shard_bytes=60_000)
    assert_same_weights(source, back)


@pytest.mark.parametrize("family", ["qwen2", "qwen2_moe", "deepseek_v3", "gpt_oss"])
def test_resharding_is_importing_with_the_other_layout(family: str, tmp_path: Path) -> None:
    """Bytes of every file, for every pair of neighbours in a ring of layouts, and both ways to the other format."""
    source = write_random(tmp_path / "hf", family)
    layouts = list(layouts_of(family).items())
    for i, (name, layout) in enumerate(layouts):
        import_hf(source, tmp_path / name, layout=layout, format="ranks", spec=("te", "local")[i % 2], mtp="load")
    import_hf(source, tmp_path / "dist", layout=layouts[0][1], format="torch_dist", spec="te", mtp="load")
    for i, (name, _) in enumerate(layouts):
        other, layout = layouts[(i + 1) % len(layouts)]
        spec = ("te", "local")[(i + 1) % len(layouts) % 2]
        reshard(tmp_path / name, tmp_path / f"{name}-{other}", layout=layout, spec=spec)
        assert contents(tmp_path / f"{name}-{other}") == contents(tmp_path / other), (name, other)
        reshard(tmp_path / "dist", tmp_path / f"dist-{other}", layout=layout, spec=spec, format="ranks")
        assert contents(tmp_path / f"dist-{other}") == contents(tmp_path / other), other
        padded = {"padded_vocab": 99}
        reshard(tmp_path / name, tmp_path / f"{name}-d", layout=layouts[0][1], format="torch_dist", spec="te", **padded)
        assert contents(tmp_path / f"{name}-d") == contents(tmp_path / "dist"), name


def test_padding_of_the_vocabulary_changes_with_the_layout(tmp_path: Path) -> None:
    """More padding than one rank's rows, so that a rank holds nothing else; then none."""
    source = write_random(tmp_path / "hf", "qwen2", tie_word_embeddings=False)
    layouts = layouts_of("qwen2")
    import_hf(source, tmp_path / "wide", layout=layouts["tp2"], format="ranks", padded_vocab=256)
    import_hf(source, tmp_path / "narrow", layout=layouts["1"], format="ranks")
    reshard(tmp_path / "wide", tmp_path / "back", layout=layouts["1"])
    assert contents(tmp_path / "back") == contents(tmp_path / "narrow")
    with CheckpointReader(tmp_path / "wide" / "common-pp0-tp1.safetensors") as reader:
        assert reader.tensors["0.embedding.word_embeddings.weight"].shape == (128, 40)
        assert not reader.read("0.embedding.word_embeddings.weight").any()
    export_checkpoint(tmp_path / "wide", tmp_path / "exported")
    assert_same_weights(source, tmp_path / "exported")
    import_hf(source, tmp_path / "dist", layout=layouts["1"], format="torch_dist", padded_vocab=256)
    reshard(tmp_path / "dist", tmp_path / "from-dist", layout=layouts["1"], format="ranks")
    assert contents(tmp_path / "from-dist") == contents(tmp_path / "narrow")


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "mixtral"])
def test_fused_and_single_experts_are_the_same_parameters(family: str, tmp_path: Path) -> None:
    single = write_random(tmp_path / "single", family)
    layout = layouts_of(family)["ep2-etp2"]
    import_hf(single, tmp_path / "a", layout=layout, format="ranks", mtp="load")
    export_checkpoint(tmp_path / "a", tmp_path / "fused", experts="fused")
    with CheckpointReader(tmp_path / "fused") as reader:
        assert any(len(info.shape) == 3 for info in reader.tensors.values())
    import_hf(tmp_path / "fused", tmp_path / "b", layout=layout, format="ranks", mtp="load")
    ranks = [{n: c for n, c in contents(tmp_path / name).items() if "safetensors" in n} for name in "ab"]
    assert ranks[0] == ranks[1]
    # A reference decides the format, the checkpoint's own memory comes after it.
    export_checkpoint(tmp_path / "b", tmp_path / "again-fused")
    assert_same_weights(tmp_path / "fused", tmp_path / "again-fused")
    export_checkpoint(tmp_path / "b", tmp_path / "again-single", reference=single)
    assert_same_weights(single, tmp_path / "again-single")
