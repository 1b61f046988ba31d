"""Tiny checkpoints of models of images and text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from mega_rl.converters.families import FAMILIES
from mega_rl.converters.hf.config import release_problems
from mega_rl.converters.safetensors.header import PLAIN_NAMES, name_prefixes, renamed
from tests.helpers.engines import exported, exported_gradients, make_config, own_rows, replaced, running_engine
from tests.helpers.engines import worst_difference as difference
from tests.helpers.models import SMALL, TINY, random_experience
from tests.unit_tests.engines.any_model_cases import judge_loss, near

TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 8}
QWEN_TOWER = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
# Like E2B: later layers read keys of earlier ones, each layer embeds tokens itself.
GEMMA4 = {
    **{
        "head_dim": 8,
        "global_head_dim": 16,
        "sliding_window": 8,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    },
    **{"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 50, "final_logit_softcapping": 30.0},
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
# model_type -> (family of the text, what the whole config has besides).
WRAPPED: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3_text", {"vision_config": {**TOWER, "image_size": 16}, "mm_tokens_per_image": 4}),
    "gemma4": ("gemma4_text", {"vision_config": {**TOWER, "head_dim": 8, "position_embedding_size": 16}}),
    "mistral3": ("mistral", {"vision_config": {**TOWER, "model_type": "pixtral", "head_dim": 8, "image_size": 16}}),
    "qwen2_5_vl": ("qwen2", {"vision_config": {**QWEN_TOWER, "fullatt_block_indexes": [0]}}),
    "qwen3_vl": ("qwen3", {"vision_config": {**QWEN_TOWER, "num_position_embeddings": 16}}),
    "qwen3_5": ("qwen3_5_text", {"vision_config": {**QWEN_TOWER, "num_position_embeddings": 16}}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {"vision_config": {**QWEN_TOWER, "num_position_embeddings": 16}}),
}
DELTA_MROPE = {**MROPE, "mrope_section": [1, 1, 0], "mrope_interleaved": True, "partial_rotary_factor": 0.25}
# Prediction layers as Qwen publishes them, outside of the model.
AHEAD = {"mtp.fc.weight": torch.arange(24).view(4, 6).bfloat16(), "mtp.norm.weight": torch.ones(3).bfloat16()}


def write_wrapped(folder: Path, model_type: str = "gemma3", *, tied: bool = True) -> Path:
    """Write a random model of images and text as transformers does, in several files."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    family, more = WRAPPED[model_type]
    text = {**SMALL, **TINY.get(family, GEMMA4), "tie_word_embeddings": tied}
    if "qwen3_5" in model_type:
        kinds = ["linear_attention", "full_attention"] * 2
        text |= {"rope_parameters": DELTA_MROPE, "layer_types": kinds, "full_attention_interval": 2}
    elif "qwen" in model_type:
        text |= {"rope_parameters": MROPE, "head_dim": 8}
    elif family == "mistral":
        text |= {"model_type": family}
    ids = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None, "image_token_id": 49}
    config = AutoConfig.for_model(model_type, text_config=text, tie_word_embeddings=tied, **ids, **more)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size="60KB")
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors by their names on disk, as safetensors reads them."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def rewrite(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> None:
    """Put these tensors into one file in the place of a folder's weights, and change keys of its config.json."""
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))


def quantise(folder: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """Store projections as fp8 in blocks of 8 x 16; return all tensors as they must be read."""
    stored, expected = tensors_of(folder), tensors_of(folder)
    for name in [name for name in stored if name.startswith(prefix) and name.endswith("_proj.weight")]:
        rows, cols = stored[name].shape
        scales = torch.rand(rows // 8, cols // 16) + 0.5
        full = scales.repeat_interleave(8, 0).repeat_interleave(16, 1)
        stored[name] = (stored[name] / full).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scales
        expected[name] = (stored[name].float() * full).bfloat16().float()
    rewrite(folder, stored, quantization_config={"quant_method": "fp8", "weight_block_size": [8, 16]})
    return expected


def plain(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors under the names of a language model by itself."""
    prefixes = name_prefixes(tensors)
    return {renamed(name, prefixes, PLAIN_NAMES): tensor for name, tensor in tensors.items()}


def train_all(rank: int, folders: dict[str, str]) -> dict[str, list[tuple[float, str]]]:
    """Three policy steps by model: the worst gradient of each against the whole model with the same weights.

    On Megatron-Core with tensor parallelism or, for experts, which transformers keeps in one tensor, and where this
    release lacks the model, on FSDP.
    """
    from transformers import AutoModelForImageTextToText

    from mega_rl.algorithms.kl import k3
    from mega_rl.algorithms.policy_losses import PPO
    from mega_rl.engines.fsdp_model import sharded_parameters
    from mega_rl.workers.models import PolicyLoss

    loss = PolicyLoss(PPO(clip_low=0.2, clip_high=0.3), kl=None, kl_estimator=k3)
    worst: dict[str, list[tuple[float, str]]] = {}
    for model_type, folder in folders.items():
        family = WRAPPED[model_type][0]
        is_fsdp = family not in FAMILIES or "moe" in family or any(release_problems(family))
        config = make_config(Path(folder), layout="tp2-sp", engine="fsdp" if is_fsdp else "megatron")
        config = replaced(config, "engine.megatron.optimizer", distributed=False)
        config = replaced(config, "optim", clip_grad=0.0)
        judge = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
        named = plain(dict(judge.named_parameters()))
        with running_engine(config) as engine:
            for seed in range(3):
                batch = near(judge, random_experience(num_prompts=2, vocab_size=48, seed=seed))
                engine.train_minibatch(own_rows(batch, engine), loss, lr=1e-3)
                judge.zero_grad()
                judge_loss(judge, batch).backward()  # type: ignore[no-untyped-call]
                expected = {name: weight.grad for name, weight in named.items() if weight.grad is not None}
                if is_fsdp:
                    actual = {name: p.grad.full_tensor() for name, p in sharded_parameters(engine.model).items()}
                else:
                    actual = plain(exported_gradients(engine))
                worst.setdefault(model_type, []).append(difference(actual, expected))
                with torch.no_grad():
                    weights = plain(exported(engine))
                    if is_fsdp:  # an export cuts the experts' tensor
                        weights = {name: p.full_tensor() for name, p in sharded_parameters(engine.model).items()}
                    for name, tensor in weights.items():
                        if name in named:  # a buffer stays
                            named[name].copy_(tensor)
    return worst
