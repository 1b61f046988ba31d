"""The contract with transformers: every symbol and behaviour of it that the package relies on beyond `from_pretrained`.

A release that changes one of them fails here, by name, and says what of the package it breaks. It is the first test to
run on a new release.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
)
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.initialization import no_init_weights

import mega_rl
from mega_rl.converters.families import FAMILIES
from mega_rl.converters.live.load import weights_on_disk
from mega_rl.rollout.decoding import ATTENTION, GrowingLayer, cache_argument, make_cache
from tests.helpers.models import SMALL, TINY

DECODED = ("qwen3", "mixtral", "deepseek_v3", "gemma3_text")  # full attention, experts, latent attention, windows


def tiny(family: str, **changes: Any) -> Any:
    return AutoConfig.for_model(FAMILIES[family].transformers_type, **{**SMALL, **TINY[family], **changes})


def built(family: str, *, attention: str = "eager", **changes: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny(family, **changes), attn_implementation=attention)
    return model.eval().requires_grad_(False)


# -- symbols -----------------------------------------------------------------------------------------------------------


def imported_symbols() -> dict[tuple[str, str], list[str]]:
    """(module of transformers, name) -> the files of mega_rl that import it."""
    root = Path(mega_rl.__file__).parent
    symbols: dict[tuple[str, str], list[str]] = {}
    for path in sorted(root.rglob("*.py")):
        text, where = path.read_text(encoding="utf-8"), str(path.relative_to(root))
        for node in ast.walk(ast.parse(text)) if "transformers" in text else ():
            if isinstance(node, ast.Import):
                modules = [alias.name.split(".")[0] for alias in node.names]
                assert "transformers" not in modules, f"{where}: import names from it"
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "transformers":
                for alias in node.names:
                    symbols.setdefault((str(node.module), alias.name), []).append(where)
    return symbols


@pytest.mark.parametrize(("symbol", "files"), imported_symbols().items(), ids=str)
def test_an_imported_symbol_is_there(symbol: tuple[str, str], files: list[str]) -> None:
    module, name = symbol
    try:
        there = hasattr(importlib.import_module(module), name)
    except ImportError:
        there = False
    assert there, f"transformers has no {module}.{name} any more, which {', '.join(files)} import"


# -- forward and cache: the embedded rollout engine --------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_takes_what_the_decoding_loop_gives(family: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny(family))
    parameters = inspect.signature(type(model).forward).parameters
    needed = {"input_ids", "attention_mask", "position_ids", cache_argument(model), "use_cache", "logits_to_keep"}
    assert needed <= parameters.keys(), f"{type(model).__name__}.forward lacks {sorted(needed - parameters.keys())}"
    assert any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()), (
        f"{type(model).__name__}.forward hands nothing on to attention, which engine.backend=fsdp needs for packed "
        "sequences"
    )


@pytest.mark.parametrize("family", DECODED)
def test_a_cache_continues_the_rows_that_are_selected_from_it(family: str) -> None:
    """Two left-padded prompts, three rows of them in another order, two more tokens: logits as without a cache."""
    model = built(family, attention=ATTENTION)
    tokens = torch.randint(2, 50, (3, 14), generator=torch.Generator().manual_seed(1))
    of_row, padding = torch.tensor([1, 0, 1]), torch.tensor([0, 3])
    prompts = tokens[1:, :12].clone()
    tokens[:, :12] = prompts[of_row]
    mask = (torch.arange(14) >= padding[:, None]).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = make_cache(model.config, max_tokens=14)

    def forward(ids: Tensor, rows: Tensor, first: int, last: int) -> Tensor:
        return model(
            input_ids=ids,
            attention_mask=mask[rows, :last],
            position_ids=positions[rows, first:last],
            use_cache=True,
            logits_to_keep=1,
            **{cache_argument(model): cache},
        ).logits[:, -1]

    forward(prompts, torch.arange(2), 0, 12)
    cache.batch_select_indices(of_row)
    forward(tokens[:, 12:13], of_row, 12, 13)
    actual = forward(tokens[:, 13:], of_row, 13, 14)
    for row, skipped in enumerate(padding[of_row].tolist()):
        expected = model(tokens[row : row + 1, skipped:], use_cache=False).logits[0, -1]
        torch.testing.assert_close(actual[row], expected, rtol=0, atol=1e-5)  # float32, other matrix shapes


def test_a_cache_is_made_of_our_layers_or_of_windows() -> None:
    kinds = [type(layer) for layer in make_cache(tiny("qwen3"), max_tokens=8).layers]
    assert kinds == [GrowingLayer] * 4, "Cache(layers=[...]) holds other layers than it is given"
    cache = make_cache(tiny("gemma3_text"), max_tokens=8)
    assert isinstance(cache, DynamicCache)
    assert cache.is_sliding == [True, True, False, True], "DynamicCache(config=...) does not follow layer_types"


def test_a_cache_layer_has_the_interface_that_ours_overrides() -> None:
    for name, arguments in {
        "update": ("key_states", "value_states"),
        "lazy_initialization": ("key_states", "value_states"),
        "get_seq_length": (),
        "get_mask_sizes": ("query_length",),
        "batch_select_indices": ("indices",),
    }.items():
        parameters = list(inspect.signature(getattr(DynamicLayer, name)).parameters)
        assert tuple(parameters[1 : 1 + len(arguments)]) == arguments, f"DynamicLayer.{name}{tuple(parameters)}"
    layer = GrowingLayer(max_tokens=8)
    assert not layer.is_initialized
    layer.update(torch.ones(2, 1, 5, 4), torch.ones(2, 1, 5, 3))
    assert layer.is_initialized
    assert Cache(layers=[layer]).get_seq_length() == 5
    assert tuple(layer.get_mask_sizes(1)) == (6, 0), "a mask's (length, offset) for one more token"


# -- attention functions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "deepseek_v3"])
def test_attention_gets_what_models_hand_on_and_no_mask(family: str) -> None:
    """Under a name without a registered mask, as the kernels of engine.backend=fsdp have."""
    calls: list[dict[str, Any]] = []

    def probe(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **others: Any) -> Any:
        calls.append({"query": query.shape, "key": key.shape, "mask": mask, **others})
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    AttentionInterface.register("contract_probe", probe)
    model = built(family, attention="contract_probe")
    model(torch.full((2, 7), 3), sequences="handed on", use_cache=False)
    heads, size = (4, 24) if family == "deepseek_v3" else (4, 16)
    assert [call["query"] for call in calls] == [torch.Size([2, heads, 7, size])] * 4
    assert all(call["mask"] is None for call in calls), "a mask of size [T, T] is made for a name that has none"
    assert all(call["sequences"] == "handed on" for call in calls), "packed sequences would see each other"
    assert all(call["scaling"] is not None for call in calls)
    if family == "gemma3_text":
        assert [call["sliding_window"] for call in calls] == [8, 8, None, 8]


# -- building models ---------------------------------------------------------------------------------------------------


def test_no_init_weights_draws_nothing_and_keeps_buffers() -> None:
    before = torch.get_rng_state()
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(tiny("qwen3"))
    # torch's own layers draw their weights too: nothing at all may have moved the generator.
    assert torch.equal(before, torch.get_rng_state()), "building a model under no_init_weights draws random numbers"
    inv_freq = 10_000.0 ** -(torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(dict(model.named_buffers())["model.rotary_emb.inv_freq"], inv_freq)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_init_weights_computes_the_buffers_of_a_model_from_the_meta_device(family: str) -> None:
    """As engine.backend=fsdp gives a model memory, one module at a time."""
    expected = dict(built(family).named_buffers())
    with no_init_weights(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny(family))
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.full_like(buffer, torch.nan, device="cpu"))
        if module._non_persistent_buffers_set:
            model._init_weights(module)
    buffers = dict(model.named_buffers())
    assert buffers.keys() == expected.keys()
    for name, buffer in buffers.items():
        assert torch.equal(buffer, expected[name]), f"_init_weights leaves {name} unset"


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_have_the_names_of_a_saved_checkpoint(tmp_path: Path, family: str) -> None:
    """Experts and blocks that transformers holds under other names than it saves them."""
    from mega_rl.converters.safetensors.reader import CheckpointReader

    model = built(family, tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    mapped = weights_on_disk(model)
    with CheckpointReader(tmp_path) as reader:
        assert {name: tuple(tensor.shape) for name, tensor in mapped.items()} == {
            name: tuple(info.shape) for name, info in reader.tensors.items()
        }
        assert all(torch.equal(mapped[name], reader.read(name)) for name in mapped)


# -- config and tokenizers ---------------------------------------------------------------------------------------------
