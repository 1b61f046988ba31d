"""`mega-rl convert`: every verb from the command line, exit codes, JSON, and mistakes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mega_rl.cli.app import main
from mega_rl.converters.safetensors.reader import CheckpointReader
from mega_rl.converters.safetensors.writer import write_checkpoint
from tests.helpers.models import write_tiny_checkpoint

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints qwen3 (tied) and qwen3_moe, each with a tokenizer file and a chat template."""
    root = tmp_path_factory.mktemp("models")
    for family in ("qwen3", "qwen3_moe"):
        write_tiny_checkpoint(root / family, family=family, vocab_size=51, tied=family == "qwen3")
        (root / family / "tokenizer.json").write_text('{"version": "1.0"}')
        (root / family / "chat_template.jinja").write_text("{{ messages }}")
    return root


@pytest.fixture(autouse=True)
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths of the tests are in a folder of their own."""
    monkeypatch.chdir(tmp_path)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `mega-rl convert`."""
    code = main(["convert", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def facts(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> dict[str, Any]:
    """The JSON object that a verb prints, alone on stdout."""
    actual, out, err = run(capsys, *arguments, "--json")
    assert actual == code, err
    result: dict[str, Any] = json.loads(out)
    return result


def test_inspect(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Elements of the stages add up: every rank of a stage holds 1 / tp of what is cut."""
    whole = facts(capsys, "inspect", models / "qwen3_moe")
    assert whole["family"] == "qwen3_moe"
    assert whole["problems"] == []
    assert whole["stages"][0]["params"] == whole["num_params"]
    halves = facts(capsys, "inspect", models / "qwen3_moe", "--pp", 2)
    assert sum(stage["params"] for stage in halves["stages"]) == whole["num_params"]
    code, out, _ = run(capsys, "inspect", models / "qwen3_moe", "--pp", 2, "--ep", 2, "--pp-layout", "Ettt|tL")
    assert code == 0
    assert "qwen3_moe" in out
    assert "layers: [0-2]" in out
    assert re.search(r"^    num_experts: 4$", out, flags=re.MULTILINE)
    assert max(map(len, out.splitlines())) < 300


def test_inspect_lists_what_does_not_fit(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Missing, strange and mis-shaped tensors by name, exit code 2."""
    with CheckpointReader(models / "qwen3") as reader:
        tensors = {name: reader.read(name) for name in reader.tensors}
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.norm.weight"] = torch.zeros(5)
    tensors["strange"] = torch.zeros(1)
    write_checkpoint("bad", tensors.items(), files={"config.json": models / "qwen3" / "config.json"})
    actual = facts(capsys, "inspect", "bad", code=2)
    missing, shape, strange = actual["problems"]
    assert "model.layers.1.mlp.up_proj.weight is missing, expected shape [64, 32]" in missing
    assert "model.norm.weight has shape [5], config.json asks for [32]" in shape
    assert "strange [1] is not part of the qwen3 model" in strange


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_import_export_verify(models: Path, capsys: pytest.CaptureFixture[str], family: str) -> None:
    """There and back: every file that is not weights byte for byte, every weight bit for bit."""
    source = models / family
    assert facts(capsys, "import", source, "ckpt")["num_bytes"] > 10_000
    assert facts(capsys, "verify", source, "ckpt")["equal"]
    assert run(capsys, "export", "ckpt", "out", "--hf", source, "--shard-gb", "0.00005")[0] == 0
    assert len(list(Path("out").glob("model-*.safetensors"))) > 1
    assert facts(capsys, "verify", source, "out")["equal"]
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (Path("out") / name).read_bytes() == (source / name).read_bytes()
    described = facts(capsys, "inspect", "ckpt")
    assert (described["kind"], described["family"]) == ("torch_dist", family)


def test_8_bit_blocks_become_bfloat16(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There and back the values are equal; that config.json no longer speaks of 8 bits is intended."""
    with CheckpointReader(models / "qwen3") as reader:
        tensors = {name: reader.read(name).bfloat16() for name in reader.tensors}
    for name in [name for name in tensors if name.endswith("q_proj.weight")]:
        tensors[name + "_scale_inv"] = torch.full((1, 1), 0.25)
        tensors[name] = (tensors[name].float() / 0.25).to(torch.float8_e4m3fn)
    config = json.loads((models / "qwen3" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    Path("config.json").write_text(json.dumps(config))
    write_checkpoint("eight", tensors.items(), files={"config.json": Path("config.json")})
    assert run(capsys, "import", "eight", "ckpt")[0] == 0
    assert run(capsys, "export", "ckpt", "out", "--hf", "eight")[0] == 0
    assert facts(capsys, "verify", "eight", "out")["equal"]
    assert "quantization_config" not in json.loads(Path("out/config.json").read_text())
    assert set(facts(capsys, "inspect", "out")["dtypes"]) == {"bfloat16"}


def test_differences_have_exit_code_1(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`diff` and `verify` name the tensor and the size of the change."""
    with CheckpointReader(models / "qwen3") as reader:
        tensors = {name: reader.read(name) for name in reader.tensors}
    tensors["model.norm.weight"][3] += 0.5
    del tensors["model.layers.0.mlp.up_proj.weight"]
    write_checkpoint("other", tensors.items(), files={"config.json": models / "qwen3" / "config.json"})
    for verb in ("diff", "verify"):
        code, out, _ = run(capsys, verb, models / "qwen3", "other")
        assert code == 1
        assert "model.norm.weight: 1 of 32 elements differ, max 0.5" in out
        assert "only in the first (1): model.layers.0.mlp.up_proj.weight" in out
    actual = facts(capsys, "diff", models / "qwen3", "other", "--allow-missing", "*.up_proj.weight", code=1)
    assert actual["only_first"] == []
    assert [d["name"] for d in actual["different"]] == ["model.norm.weight"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("inspect", "nowhere"), "nowhere: no such directory"),
        (("inspect", "MODEL", "--tp", 3), "tp=3 does not divide num_attention_heads=4"),
        (("inspect", "MODEL", "--pp", 2, "--pp-layout", "Et|ttL"), "must be num_hidden_layers=4"),
        (("inspect", "MODEL", "--head", "both"), "'--head': Value error, 'both' is not one of 'lm', 'value'"),
        (("inspect", "MODEL", "--mtp", "load"), "has no multi-token prediction layers"),
        (("import", "MODEL", "full"), "full"),
        (("import", "MODEL", "out", "--dtype", "int3"), "dtype=int3: must be one of"),
        (("export", "MODEL", "out"), "MODEL"),
        (("export", "nowhere", "out", "--shard-gb", "0"), "--shard-gb"),
        (("diff", "MODEL", "nowhere"), "nowhere"),
    ],
)
def test_mistakes(models: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[object, ...], words: str) -> None:
    """One line each, exit code 2, nothing written."""
    Path("full").mkdir()
    Path("full/precious").write_text("x")
    os.symlink(models / "qwen3", "MODEL")
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert words in err
    assert all(line.startswith("error: ") for line in err.splitlines()), err
    assert sorted(path.name for path in Path().iterdir()) == ["MODEL", "full"]
    assert [path.name for path in Path("full").iterdir()] == ["precious"]


def test_script_is_the_command(models: Path) -> None:
    script = str(ROOT / "scripts" / "convert_checkpoint.py")
    command = [sys.executable, script, "import", str(models / "qwen3_moe"), "two", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert main(["convert", "import", str(models / "qwen3_moe"), "one"]) == 0
    assert contents(Path("one")) == contents(Path("two"))
    assert json.loads(done.stdout)["num_files"] == 1


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
