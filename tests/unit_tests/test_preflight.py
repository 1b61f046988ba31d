"""Checks before a run: what is missing or damaged is said in one line each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mega_rl.config.loader import load
from mega_rl.config.rules.rollout import generates
from mega_rl.errors import UserError, UserErrors
from mega_rl.plan.preflight import check_together, checkpoints, host, launched_world_size, preflight
from mega_rl.rollout.sglang.server.installation import Installation
from tests.helpers.inputs import qwen3_config, write_checkpoint, write_prompts, write_shard
from tests.unit_tests.converters.tiny_configs import TINY, YARN

BASE = ("model.path=m", "data.train_files=[d.jsonl]")
ROLES = ("algorithm.advantage=gae", "model.ref_path=r", "model.critic_path=c", "algorithm.kl=loss")
HTTP = ("reward.source=http", "reward.source.url=https://rewards.example/score")
MODEL = ("reward.source=model", "reward.source.path=r")
ONE_LABEL = "; a reward model is a sequence-classification checkpoint with one label"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with a checkpoint m and a data file d.jsonl."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(host, "free_bytes", lambda path: 10**15)
    write_checkpoint(tmp_path / "m", qwen3_config())
    write_prompts(tmp_path / "d.jsonl")
    return tmp_path


def problems(*overrides: str, world_size: int | None = None, base: tuple[str, ...] = BASE) -> list[str]:
    """Return the mistakes of a run, none of a legal one."""
    try:
        preflight([None], [*base, *overrides], world_size=world_size)
    except UserErrors as errors:
        return list(errors.problems)
    return []


def test_legal_run_can_start() -> None:
    write_checkpoint(Path("r"), qwen3_config("8b"))
    pq.write_table(pa.table({"prompt": ["1+1="], "answer": ["2"]}), "v.parquet")
    Path("reward.py").write_text("def score(text, answer):\n    raise SystemExit('must not run')\n")
    files = ["data.val_files=[v.parquet]", "reward.function=reward.py:score", "checkpoint.resume=m"]
    roles = ["model.ref_path=r", "model.critic_path=r", "algorithm.advantage=gae", "algorithm.kl=reward"]
    config = preflight([None], [*BASE, *files, *roles, "data.chat.template=true", "trainer.val_interval=1"])[0]
    assert config.model.path == "m"
    assert not Path(config.trainer.run_dir).exists()  # looking makes nothing


def test_settings_of_environments_are_refused_for_sources_that_generate() -> None:
    """Before a server starts; a file that fails to import has its own line only."""
    form = "class {}:\n    def __init__(self, context): ...\n    {}\n    def metrics(self): ...\n"
    world, recorded = form.format("World", "async def run(self): ..."), form.format("Own", "def generate(self): ...")
    ahead, name = ("trainer.async_steps=2", "algorithm.correction=tis", "reward.function=own.py:f"), "rollout.source="
    Path("own.py").write_text(f"{world}{recorded}def f(text, answer): ...\n")
    (line,) = problems(*ahead, f"{name}own.py:Own")
    assert line.startswith("rollout.source='own.py:Own': trainer.async_steps=2 needs an environment or the built-in")
    assert problems(*ahead, f"{name}own.py:World") == []
    (line,) = generates(load(None, [*BASE, f"{name}own.py:Own", "rollout.sglang.return_routing=true"]))
    assert line.startswith("rollout.source='own.py:Own': rollout.sglang.return_routing needs the built-in source or")
    Path("own.py").write_text("import nothing_here\ndef f(text, answer): ...\n")
    assert all("fails to import" in line for line in problems(*ahead, f"{name}own.py:Own"))


def test_runs_on_one_base_have_its_settings() -> None:
    rank = "model.adapter.rank=4"
    base = load(None, [*BASE, rank, "trainer.run_dir=a", "engine.megatron.tp=2"])
    others = {
        ("trainer.run_dir=a", rank): "trainer.run_dir=a is the folder of two runs; name one for each",
        (
            "trainer.run_dir=b",
        ): "trainer.run_dir=b: model.adapter.rank=0 leaves nothing to one run only; set it above 0",
        ("trainer.run_dir=c", rank, "rollout.backend=sglang"): "trainer.run_dir=c: rollout.backend=sglang samples",
        ("trainer.run_dir=d", rank, "algorithm.kind=rm"): "trainer.run_dir=d: algorithm.kind=rm trains a head",
    }
    for given, problem in others.items():
        other = load(None, [*BASE, "engine.megatron.tp=2", *given])
        with pytest.raises(UserErrors) as errors:
            check_together([base, other])
        assert any(one.startswith(problem) for one in errors.value.problems), errors.value.problems
    with pytest.raises(UserErrors) as errors:
        check_together([base, load(None, [*BASE, rank, "trainer.run_dir=e", "optim.lr=1"])])
    (problem,) = errors.value.problems
    assert problem == "engine.megatron.tp=1 in e, 2 in a: runs on one base have the same; set one value"


def test_world_size_comes_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched_world_size() == 1
    monkeypatch.setenv("WORLD_SIZE", "6")
    (line,) = problems()
    assert line.startswith("trainer.prompts_per_step=64 is not a multiple of the data-parallel size 6")
    assert preflight([None], BASE, world_size=2)[0]
    for text in ("0", "two", "²"):
        monkeypatch.setenv("WORLD_SIZE", text)
        with pytest.raises(UserError, match=r"WORLD_SIZE=.*needs a whole number of at least 1"):
            preflight([None], BASE)


def test_rules_see_the_model() -> None:
    (line,) = problems("engine.megatron.tp=32", world_size=32)
    assert line == "engine.megatron.tp=32 does not divide the 16 attention heads of model.path; legal: 1, 2, 4, 8, 16"
    assert [line.split(":")[0] for line in problems(base=())] == ["model.path is empty", "data.train_files is empty"]


def index(names: object) -> None:
    Path("m/model.safetensors").unlink()
    Path("m/model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def lacking() -> None:
    Path("m/model.safetensors").rename("m/a.safetensors")
    Path("m/model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "a.safetensors"}}))


def weights(data: bytes = b"", *, end: int | None = None, tail: bytes = b"") -> None:
    Path("m/model.safetensors").write_bytes(data or Path("m/model.safetensors").read_bytes()[:end] + tail)


def tokenizer(text: str) -> None:
    Path("m/tokenizer.json").write_text(text)


def architecture(**changes: object) -> None:
    Path("m/config.json").write_text(json.dumps({**qwen3_config(), **changes}))


# name -> damage, settings, beginning of the one problem
DAMAGE: dict[str, tuple[Callable[[], object], tuple[str, ...], str]] = {
    "other format": (
        lambda: Path("m/model.safetensors").rename("m/pytorch_model.bin"), (),
        "checkpoint m: holds neither model.safetensors nor model.safetensors.index.json; pickled .bin weights are",
    ),
    "missing shard": (
        lambda: index({"w": "a.safetensors"}), (),
        "m/a.safetensors: no such file, but the index puts 1 tensors there (w, ...); download or copy it again",
    ),
    "shard outside": (
        lambda: index({"w": "../m/model.safetensors"}), (),
        "m/model.safetensors.index.json: w is in '../m/model.safetensors', must be a relative path inside the check",
    ),
    "shard without a tensor": (lacking, (), "m/a.safetensors: lacks w, which the index puts there"),
    "no index": (
        lambda: index([]), (),
        "m/model.safetensors.index.json: weight_map is list, must be an object from tensor to file name; download",
    ),
    "truncated": (
        lambda: weights(end=-2), (),
        "m/model.safetensors: truncated, 76 bytes of the 78 that its header lists; fetch the file again",
    ),
    "tail": (lambda: weights(tail=b"x"), (), "m/model.safetensors: 1 bytes follow the last tensor; fetch"),
    "header": (lambda: weights((3).to_bytes(8, "little") + b"{x}"), (), "m/model.safetensors: not valid JSON ("),
    "zip": (
        lambda: weights(b"PK\x03\x04 this is a zip"), (), "m/model.safetensors: header of 7595448452415441744 bytes, ",
    ),
    "no tokenizer": (
        lambda: Path("m/tokenizer.json").unlink(), (),
        "m: no tokenizer; it needs one of tokenizer.json, tokenizer.model, vocab.json, vocab.txt",
    ),
    "tokenizer, torn": (lambda: tokenizer("["), (), "m/tokenizer.json: not JSON; download or copy it again"),
    "tokenizer, other": (
        lambda: tokenizer('{"added_tokens": [3]}'), (),
        "m/tokenizer.json: not a tokenizer as the tokenizers library writes it; save it again",
    ),
    "tokenizer, too large": (
        lambda: tokenizer(json.dumps({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 151936}]})), (),
        "m: the tokenizer has token id 151936, the model a vocabulary of 151936; they do not belong together",
    ),
    "no chat template": (
        lambda: Path("m/tokenizer_config.json").unlink(), ("data.chat.template=true",),
        "m: the tokenizer has no chat template; set data.chat.template=auto",
    ),
    "config": (lambda: Path("m/config.json").write_text("{"), (), ""),
    "no folder": (dict, ("model.path=nowhere",), ""),
    "layers": (
        dict, ("engine.megatron.pp=2", "engine.megatron.pipeline=Ett|ttL"),
        "engine.megatron.pipeline: pipeline=[2, 2] holds 4 layers, the model has 28",
    ),
    "notation": (
        dict, ("engine.megatron.pp=2", "engine.megatron.pipeline=tt|ttL"),
        "engine.megatron.pipeline: pipeline layout 'tt|ttL': must ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_checkpoint_is_reported(name: str) -> None:
    damage, settings, line = DAMAGE[name]
    damage()
    (problem,) = problems(*settings, world_size=2)
    assert problem.startswith(line if line.startswith("engine") else f"model.path: {line}")


def test_families_without_training_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rollout engine or a release of transformers computes them wrongly; windows and YaRN train."""
    for changes in (
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
    ):
        architecture(**changes)
        assert problems() == []
    scaling = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
    config = {"model_type": "deepseek_v2", **TINY["deepseek_v2"], "rope_scaling": scaling}
    Path("m/config.json").write_text(json.dumps(config))
    for release, count in (("5.12.1", 1), ("5.15.0", 0)):
        monkeypatch.setattr(checkpoints, "version", {"transformers": release}.__getitem__)
        lines = [problem for problem in problems() if "deepseek_v2" in problem]
        assert len(lines) == count
        assert all(line.endswith("run 'pip install \"transformers>=5.15.0\"'") for line in lines)


def test_reference_and_critic_are_checked() -> None:
    write_checkpoint(Path("r"), qwen3_config("8b", vocab_size=1000, num_hidden_layers=7))
    (Path("r") / "model.safetensors").unlink()
    lines = problems(*ROLES, "engine.megatron.pp=2", world_size=2)
    assert lines[0].startswith("engine.megatron.pp*vpp=2*1=2 does not divide the 7 layers of model.ref_path;")
    assert lines[1].startswith("model.critic_path: ")
    assert lines[2].startswith("model.ref_path: checkpoint r: holds neither model.safetensors nor")
    assert lines[3:] == []  # the vocabulary is smaller, but holds every token of the tokenizer, which is the same


def change_tokenizer(folder: str, **changes: object) -> None:
    path = Path(folder) / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def write_roles(reference: int = 151936, critic: int = 151936) -> None:
    for name, size in (("r", reference), ("c", critic)):
        write_checkpoint(Path(name), qwen3_config("8b", vocab_size=size))


def test_vocabularies_may_be_padded_differently() -> None:
    write_roles(152064, 3)
    change_tokenizer("r", padding={"strategy": "BatchLongest"}, decoder={"type": "Fuse"})
    assert problems(*ROLES) == []


def test_roles_must_have_the_actors_tokenizer() -> None:
    """The same ids; without a list of tokens, as of SentencePiece, the same vocabulary and files."""
    write_roles(critic=152064)
    change_tokenizer("r", model={"type": "WordLevel", "vocab": {"a": 0, "é": 1}})
    change_tokenizer("c", normalizer={"type": "NFC"})
    fix = "it reads the actor's tokens, so take a checkpoint with the same tokenizer"
    assert problems(*ROLES) == [
        "model.ref_path: r: its tokenizer is not that of model.path (m): token id 1 is 'é' here, 'b' there; " + fix,
        "model.critic_path: c: its tokenizer is not that of model.path (m): the tokens are the same, but they differ "
        "in normalizer; " + fix,
    ]
    for name in "rc":
        (Path(name) / "tokenizer.json").unlink()
    (line,) = problems(*ROLES)
    assert "(m): it has a vocabulary of 152064, model.path one of 151936; " in line
    Path("m/tokenizer.json").unlink()
    for name in "mrc":
        (Path(name) / "tokenizer.model").write_bytes(b"pieces")
    assert problems(*ROLES) == [line]
    (Path("r") / "tokenizer.model").write_bytes(b"other pieces")
    assert problems(*ROLES)[0].startswith("model.ref_path: r: its tokenizer is not that of model.path (m): ")


@pytest.mark.parametrize("key", ["data.train_files", "data.val_files", "data.mixture.sources.a"])
def test_data_files_are_checked(key: str) -> None:
    Path("empty.jsonl").touch()
    Path("text.txt").write_text("x")
    Path("other.jsonl").write_text('{"question": "1", "answer": "2"}\n')
    Path("broken.parquet").write_bytes(b"PAR1")
    pq.write_table(pa.table({"q": ["1"]}), "other.parquet")
    files = "[no.jsonl,empty.jsonl,text.txt,other.jsonl,broken.parquet,other.parquet]"
    settings = [f"{key}={{files: {files}}}" if "mixture" in key else f"{key}={files}"]
    settings += ["trainer.val_interval=1"] * (key == "data.val_files")
    assert problems(*settings, base=BASE[:1] if "mixture" in key else BASE) == [
        f"{key}: no.jsonl: no such file (looked for {Path.cwd()}/no.jsonl)",
        f"{key}: empty.jsonl: is empty",
        f"{key}: text.txt: unknown kind of file; legal: .jsonl, .parquet, or org/name of the Hub",
        f"{key}: other.jsonl: has no column 'prompt' (data.prompt_key); it has answer, question",
        f"{key}: broken.parquet: not a readable Parquet file; write it again",
        f"{key}: other.parquet: has no column 'prompt' (data.prompt_key); it has q",
    ]


def test_reward_functions() -> None:
    source = "import math\nfrom os import path as p\nlimit = 3\ndef score():\n    def inner(): ...\n"
    Path("reward.py").write_text(source + "raise SystemExit('run')\n")
    Path("broken.py").write_text("x = 1\ndef f(:\n")
    for name in ("score", "limit", "math", "p"):
        assert problems(f"reward.function=reward.py:{name}") == []
    bad = {
        "exact": "legal: ",
        "reward.py": "name the function too, as reward.py:score; reward.py has score",
        "no.py:score": f"no.py: no such file (looked for {Path.cwd()}/no.py)",
        "broken.py:f": "broken.py is not valid Python in line 2",
        "reward.py:inner": "reward.py defines no 'inner'; it has score",
    }
    for function, why in bad.items():
        (line,) = problems(f"reward.function='{function}'")
        assert line.startswith(f"reward.function={function!r}: {why}")
    functions = "reward.functions={a: exact_match, b: 'reward.py:score'}"
    assert problems(functions, "reward.sources={chat: [a, b]}", "data.source_key=set") == []
    assert problems(functions, "reward.functions={mean: math_verify, b: 'reward.py:no'}") == [
        "reward.functions.mean: is not ASCII, or the name of another metric below reward/; rename it",
        "reward.functions.b='reward.py:no': reward.py defines no 'no'; it has score",
    ]


NAMED = "reward.functions={a: exact_match, b: math_verify}"
# settings -> the words of each mistake
REWARDS: dict[tuple[str, ...], list[str]] = {
    (NAMED, "reward.sources={chat: [b, c, b], x: []}"): [
        "reward.sources.chat=['b', 'c', 'b']: must name some of reward.functions; legal: a, b",
        "reward.sources.x=[]: must name some of reward.functions; legal: a, b",
        "reward.functions.a scores nothing: no entry of reward.sources names it; leave it out",
    ],
    (NAMED, "reward.weights={c: 1}"): ["reward.weights.c has no effect: no function of that name is in "],
    (NAMED, "reward.function=math_verify"): ["reward.function=math_verify has no effect: it needs no reward.functions"],
    (NAMED, "reward.functions={a: 1}"): ["reward.functions={'a': 1}: the value of a must be a text"],
    (NAMED, "reward.sources={chat: a}"): ["reward.sources={'chat': 'a'}: the value of chat must be a list of texts"],
    ("reward.sources={chat: [b]}",): ["reward.sources={'chat': ['b']} has no effect: it needs reward.functions"],
    ("data.source_key=set",): ["data.source_key=set has no effect: it needs reward.sources"],
    HTTP: [],
    (*HTTP, "reward.source.key_file=key"): [],
    (*HTTP, "reward.source.url=http://localhost:8000/", "reward.source.key_file=key"): [],
    (*HTTP, "reward.source.url=http://rewards.example/", "reward.source.key_file=key"): [
        "reward.source.url='http://rewards.example/' with reward.source.key_file: the key would travel unencrypted"
    ],
    (*HTTP, "reward.source.url=https://me:word@h/"): [
        "reward.source.url: legal: http://host:port/path or https://host/path, without user"
    ],
    (*HTTP, "reward.source.url=rewards.example"): [
        "reward.source.url needs an address that begins with http:// or https://"
    ],
    (*HTTP, "reward.source.timeout_s=600"): ["reward.source.timeout_s=600 must be below trainer.timeout_s=600, the "],
    (*HTTP, "reward.source.key_file=open"): ["reward.source.key_file: open: must hold one key of printable ASCII "],
    (*HTTP, "reward.source.key_file=nowhere"): ["reward.source.key_file: nowhere: must hold one key of printable "],
    (*HTTP, "reward.function=no.py:f"): ["reward.function=no.py:f has no effect"],
    ("reward.source=model",): ["reward.source=model needs reward.source.path: name a sequence-classification"],
    ("reward.source=model", "reward.source.path=nowhere"): [
        "reward.source.path: checkpoint nowhere: no such directory"
    ],
}


@pytest.mark.parametrize("settings", REWARDS, ids=lambda settings: settings[-1])
def test_sources_of_rewards_are_checked(settings: tuple[str, ...]) -> None:
    for name, mode in (("key", 0o600), ("open", 0o640)):
        Path(name).write_text("s3cret")
        Path(name).chmod(mode)
    lines = problems(*settings)
    assert len(lines) == len(REWARDS[settings])
    assert all(line.startswith(words) for line, words in zip(lines, REWARDS[settings], strict=True)), lines


def write_reward_model(shape: tuple[int, int] = (1, 4096), name: str = "score.weight", **changes: object) -> None:
    """A sequence-classification checkpoint r of Qwen3-8B's shape, as far as files are looked at."""
    write_checkpoint(Path("r"), qwen3_config("8b", **{"id2label": {"0": "LABEL_0"}, **changes}))
    size = 4 * shape[0] * shape[1]
    header = json.dumps({name: {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}).encode()
    Path("r/model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))


def test_reward_models() -> None:
    write_reward_model()
    change_tokenizer("r", model={"type": "WordLevel", "vocab": {"other": 0}})  # it may have one of its own
    assert problems(*MODEL) == []
    Path("r/model.safetensors").rename("r/b.safetensors")
    write_shard(Path("r/a.safetensors"))
    shards = {"weight": "a.safetensors", "score.weight": "b.safetensors"}
    Path("r/model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert problems(*MODEL) == []
    shutil.rmtree("r")
    write_reward_model(num_hidden_layers=7)
    Path("r/tokenizer.json").unlink()
    lines = problems(*MODEL, "engine.megatron.pp=2", world_size=2)
    assert lines[0].startswith("engine.megatron.pp*vpp=2*1=2 does not divide the 7 layers of reward.source.path; ")
    assert lines[1].startswith("reward.source.path: r: no tokenizer; it needs one of ")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"name": "lm_head.weight"}, f"r: score.weight must have the shape [1, 4096], not None{ONE_LABEL}"),
        ({"shape": (2, 4096)}, f"r: score.weight must have the shape [1, 4096], not [2, 4096]{ONE_LABEL}"),
        ({"shape": (1, 1024)}, f"r: score.weight must have the shape [1, 4096], not [1, 1024]{ONE_LABEL}"),
        (
            {"vocab_size": 2},
            "r: the tokenizer has token id 2, the model a vocabulary of 2; they do not belong together",
        ),
    ],
)
def test_checkpoints_that_are_no_reward_models(changes: dict[str, Any], line: str) -> None:
    write_reward_model(**changes)
    assert problems(*MODEL) == [f"reward.source.path: {line}"]


def test_a_reward_model_needs_room_for_one_more_token() -> None:
    write_reward_model()
    sizes = ["data.max_prompt_tokens=1000", "rollout.max_new_tokens=1000"]
    key = "trainer.microbatch.max_tokens"
    assert problems(*sizes, f"{key}=2000") == problems(*MODEL, *sizes, f"{key}=2001") == []
    assert problems(*MODEL, *sizes, "trainer.microbatch.packing=false") == []
    (line,) = problems(*MODEL, *sizes, f"{key}=2000")
    assert line.endswith("=2000 and one more token for the reward model; make it at least 2001")
    (line,) = problems(*MODEL, *sizes, f"{key}=2003", "engine.megatron.cp=2", world_size=2)
    assert line.endswith("make it at least 2004")


def test_folders_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems("trainer.run_dir=d.jsonl/run", "checkpoint.resume=step_5") == [
        "checkpoint.resume='step_5': no such directory; legal: auto, never or a checkpoint directory",
        f"trainer.run_dir='d.jsonl/run': {Path('d.jsonl').absolute()} is a file; name a folder",
    ]
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    assert problems("trainer.run_dir=runs/x") == [
        f"trainer.run_dir='runs/x': {Path.cwd()} is not writable; name another folder"
    ]


def test_packages_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    te, deepep = "engine.megatron.transformer_impl=transformer_engine", "engine.megatron.moe.dispatcher=deepep"
    assert problems(te, "trainer.device=cpu") == [
        f"{te}: the package transformer_engine is not installed; install it, or set auto or local",
        f"{te} cannot run with trainer.device=cpu; set auto or local",
    ]
    lines = problems(deepep, "trainer.device=cpu")
    assert f"{deepep}: the package deep_ep is not installed; install it, or set alltoall" in lines
    assert f"{deepep} cannot run with trainer.device=cpu; set alltoall" in lines


def test_servers_to_start_need_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a compiler on GPUs; servers to join need only keys that nobody else can read."""
    sglang = "rollout.backend=sglang"
    joined = (sglang, "rollout.sglang.urls=[http://127.0.0.1:30000]", "rollout.sglang.keys_file=keys.json")
    with monkeypatch.context() as patch:
        patch.setattr("sys.prefix", "/nowhere")
        patch.setattr("importlib.util.find_spec", lambda name: None if name == "sglang" else object())
        (line,) = problems(sglang)
        assert line.startswith("rollout.backend=sglang needs SGLang 0.5.21; it is not installed")
        (line,) = problems(*joined)
        assert line.startswith("rollout.sglang.keys_file: keys.json: cannot be read as a file of keys")
        Path("keys.json").write_text('{"api_key": "a", "admin_key": "b"}')
        Path("keys.json").chmod(0o644)
        (line,) = problems(*joined)
        assert "others than its owner may read it (mode 644); chmod 600" in line
        Path("keys.json").chmod(0o600)
        fleet = (*joined, "rollout.sglang.urls=fleet.txt")
        (line,) = problems(*fleet)
        assert line.startswith("rollout.sglang.urls=fleet.txt: no such file (looked for")
        Path("fleet.txt").write_text("")
        assert not problems(*fleet)
        Path("keys.json").chmod(0o600)
        assert problems(*joined) == []
    monkeypatch.setattr(host, "require_sglang", lambda device: Installation("0.5.21", None))
    monkeypatch.setenv("HOME", "/nowhere")
    assert problems(sglang) == []  # without GPUs
    monkeypatch.setattr(host, "smallest_gpu", lambda: 2**36)
    start = "rollout.backend=sglang: SGLang compiles kernels when it starts: "
    home = f"{start}HOME=/nowhere is not a writable folder, and compiled kernels are kept there: set HOME to one"
    assert home in problems(sglang)


@pytest.mark.parametrize(
    ("tied", "backend", "refused"), [(True, "sglang", True), (False, "sglang", False), (True, "hf", False)]
)
def test_sglang_does_not_tie_every_family(tied: bool, backend: str, refused: bool) -> None:
    write_checkpoint(Path("moe"), {**TINY["qwen3_moe"], "tie_word_embeddings": tied})
    lines = problems("model.path=moe", f"rollout.backend={backend}", "trainer.run_dir=d.jsonl")
    assert any("layer separate weights" in line for line in lines) == refused


def test_sglang_lacks_families() -> None:
    write_checkpoint(Path("m4"), TINY["mistral4"])
    lines = problems("model.path=m4", "rollout.backend=sglang", "trainer.run_dir=d.jsonl")
    assert "model.path: model_type=mistral4: SGLang 0.5.21 has no such model; set rollout.backend=hf" in lines


def test_full_disk_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """12 bytes for each of Qwen3-0.6B's 596,049,920 parameters in FP32, of actor and critic; 2 for bf16 weights."""
    monkeypatch.setattr(host, "free_bytes", lambda path: 10**9)
    (line,) = problems("algorithm.advantage=gae", "model.dtype=fp32")
    saved = "what the run saves takes about 14.3 GB and its disk has 1 GB"
    assert line.startswith(f"trainer.run_dir='runs/default': {saved}")
    assert "about 8.34 GB" in problems("algorithm.advantage=grpo", "rollout.n=2", "model.dtype=bf16")[0]
    assert "about 1.19 GB" in problems("checkpoint.save_final=false", "checkpoint.hf_final=true", "model.dtype=bf16")[0]
    assert problems("checkpoint.save_final=false") == []


def test_chat_template_names_its_variables() -> None:
    template, kwargs = "data.chat.template=true", "data.chat.template_kwargs"
    Path("m/chat_template.jinja").write_text("{% if enable_thinking %}think{% endif %}{{ messages }}{{ tools }}")
    assert problems(template, f"{kwargs}={{enable_thinking: false, tools: []}}") == []
    assert problems(template, f"{kwargs}.thinking=false", f"{kwargs}.messages=[]") == [
        f"model.path: {kwargs}.{name}: the chat template in m reads no {name}; legal: enable_thinking, tools"
        for name in ("messages", "thinking")
    ]
    mixture = "data.mixture.sources.a={files: d.jsonl, template_kwargs: {thinking: true}}"
    (line,) = problems(mixture, template, base=BASE[:1])
    assert line.startswith("model.path: data.mixture.sources.a.template_kwargs.thinking: the chat template in m reads ")
    (line,) = problems(template, "data.chat.date=2026-01-31")
    assert line.startswith("model.path: data.chat.date='2026-01-31': write it as 2026-01-31, for a chat template that ")
    Path("m/chat_template.jinja").write_text("{{ strftime_now('%d %b %Y') }}{{ messages }}")
    assert problems(template, "data.chat.date=2026-01-31") == []
    (line,) = problems(template, "data.chat.date=31.1.26")
    assert line.startswith("model.path: data.chat.date='31.1.26': write it as 2026-01-31")
    lines = problems("data.chat.system_prompt=short", f"{kwargs}.enable_thinking=false")
    assert [line.split(":")[0] for line in lines] == [
        f"{kwargs}={{'enable_thinking'", "data.chat.system_prompt=short has no effect",
    ]  # fmt: skip
