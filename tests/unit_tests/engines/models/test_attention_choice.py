"""Which attention is asked for, which runs, and what the user is told where it cannot."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

from mega_rl.config.loader import load
from mega_rl.config.needs import Role, requested_attention
from mega_rl.config.schema import Config
from mega_rl.config.setting import ATTENTION
from mega_rl.converters.hf.config import parse_hf_config, read_hf_config
from mega_rl.engines.models.specs import check_one_backend, choose_attention
from mega_rl.errors import UserError
from tests.helpers.models import write_tiny_checkpoint
from tests.unit_tests.converters.tiny_configs import TINY

DENSE = parse_hf_config(TINY["qwen3"])


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the package were installed."""
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "2.8.3" if name == "flash-attn" else real(name), raising=True
    )


def choose(requested: str, impl: Any, **changes: Any) -> str:
    where = {"key": "model.attn_implementation", "hf": DENSE, "device_type": "cuda", "dtype": "bf16", **changes}
    return choose_attention(requested, impl=impl, **where)


@pytest.mark.usefixtures("flash_attn")
@pytest.mark.parametrize(
    ("impl", "device_type", "dtype", "runs"),
    [
        ("local", "cpu", "fp32", {"auto": "sdpa", "eager": "eager", "sdpa": "sdpa"}),
        ("local", "cuda", "bf16", {"auto": "sdpa", "eager": "eager", "sdpa": "sdpa"}),
        ("te", "cuda", "fp32", {"auto": "te: auto", "eager": "te: unfused"}),
        (
            *("te", "cuda", "bf16"),
            {"auto": "te: auto", "eager": "te: unfused", "sdpa": "te: fused", "flash_attention_2": "te: flash"},
        ),
        ("hf", "cpu", "bf16", {"auto": "sdpa", "eager": "eager", "sdpa": "sdpa"}),
        ("hf", "cuda", "fp32", {"auto": "sdpa", "eager": "eager", "sdpa": "sdpa"}),
        (
            *("hf", "cuda", "bf16"),
            {
                "auto": "flash_attention_2",
                "eager": "eager",
                "sdpa": "sdpa",
                "flash_attention_2": "flash_attention_2",
            },
        ),
    ],
)
def test_what_runs(impl: str, device_type: str, dtype: str, runs: dict[str, str]) -> None:
    """Every word on every kind of layers: it runs, or is refused with all that would."""
    for word in ATTENTION:
        if word in runs:
            assert choose(word, impl, device_type=device_type, dtype=dtype) == runs[word]
            continue
        with pytest.raises(UserError) as refused:
            choose(word, impl, device_type=device_type, dtype=dtype)
        message = str(refused.value)
        assert message.startswith(f"model.attn_implementation={word} cannot run in ")
        assert message.endswith("available here: " + ", ".join(w for w in ATTENTION if w in runs))


@pytest.mark.usefixtures("flash_attn")
def test_windows_that_transformers_does_not_hand_on(tmp_path: Path) -> None:
    """FlashAttention would see the whole sequence in Qwen2-MoE's layers with windows."""
    windows = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}
    moe = read_hf_config(write_tiny_checkpoint(tmp_path / "moe", family="qwen2_moe", tied=False, **windows))
    assert moe.window is not None
    assert choose("auto", "hf", hf=moe) == "sdpa"
    with pytest.raises(UserError, match="it needs use_sliding_window=false"):
        choose("flash_attention_2", "hf", hf=moe)
    assert choose("auto", "hf", hf=dataclasses.replace(moe, window=None)) == "flash_attention_2"
    assert choose("flash_attention_2", "te", hf=moe) == "te: flash"


@pytest.mark.parametrize(
    ("role", "own"),
    [
        ("actor", None),
        ("critic", "model.critic_attn_implementation"),
        ("reference", "model.ref_attn_implementation"),
        ("reward", "reward.source.attn_implementation"),
    ],
)
def test_a_role_s_own_key_comes_first(role: Role, own: str | None) -> None:
    """From a command line; without it model.attn_implementation holds, and by default that is auto."""
    assert requested_attention(Config(), role) == ("auto", "model.attn_implementation")
    everywhere = ["model.attn_implementation=eager", "reward.source=model"]
    assert requested_attention(load(None, everywhere), role) == ("eager", "model.attn_implementation")
    if own is not None:
        assert requested_attention(load(None, [*everywhere, f"{own}=sdpa"]), role) == ("sdpa", own)
        assert requested_attention(load(None, [*everywhere, f"{own}=auto"]), role) == ("auto", own)


def test_one_backend_of_transformer_engine() -> None:
    """Megatron-Core sets it for the process: the same from everyone, wherever it was asked for."""
    roles: tuple[Role, ...] = ("actor", "critic", "reference")

    def check(*settings: str) -> None:
        config = load(None, settings)
        check_one_backend({role: requested_attention(config, role) for role in roles})

    check()
    check("model.attn_implementation=eager", "model.critic_attn_implementation=eager")
    with pytest.raises(UserError) as refused:
        check("model.attn_implementation=sdpa", "model.ref_attn_implementation=eager")
    assert str(refused.value) == (
        "model.attn_implementation=sdpa (actor) and model.ref_attn_implementation=eager (reference): Transformer "
        "Engine has one backend for all models of a process; ask for the same in both, or set "
        "engine.megatron.transformer_impl=local"
    )
