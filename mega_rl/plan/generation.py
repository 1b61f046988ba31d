"""Memory of generation: the embedded engine's copy and cache, and the servers' weights and cache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from mega_rl.converters.architecture import HFConfig
from mega_rl.plan.setup import RunSetup
from mega_rl.plan.state.fsdp import transformers_parameters

# Memory of a server that no release gives back: CUDA's context, graphs and workspaces (not measured yet; SGLang
# reserves as much when it chooses its share).
SERVER_RESIDUE = 3 * 10**9


@dataclass(frozen=True)
class EmbeddedBytes:
    """Bytes of the embedded engine on one device."""

    weights: int
    cache: int  # of full length
    rows: int  # generated together


@dataclass(frozen=True)
class ServerBytes:
    """Bytes of one SGLang server on each of its devices."""

    weights: int
    cache: int  # of the sequences that run at once
    residue: int  # while it sleeps
    sequences: int  # of full length that the cache holds


def kv_bytes_per_token(hf: HFConfig, itemsize: int, *, tp: int = 1) -> int:
    """Return the bytes of a token's keys and values over all layers on one tensor-parallel rank."""
    if hf.mla is not None:
        return hf.num_layers * (hf.mla.kv_lora_rank + hf.mla.qk_rope_head_dim) * itemsize  # the same on every rank
    heads = -(-hf.num_kv_heads // tp)
    return hf.num_layers * 2 * heads * hf.head_dim * itemsize


@lru_cache(maxsize=64)
def weight_bytes(hf: HFConfig, itemsize: int) -> int:
    """Return the bytes of the whole language model."""
    return itemsize * sum(parameter.rows * parameter.width for parameter in transformers_parameters(hf, "lm"))


def embedded(setup: RunSetup) -> EmbeddedBytes:
    """Return the memory of the embedded engine, whose responses all reach the longest length.

    transformers' models keep whole heads of latent attention in their cache, not the latents.
    """
    config, hf, b = setup.config, setup.actor.hf, setup.rollout_itemsize
    rows = min(config.rollout.hf.batch_size, rows_of_a_rank(setup))
    per_token = kv_bytes_per_token(hf, b)
    if hf.mla is not None:
        width = hf.mla.qk_nope_head_dim + hf.mla.qk_rope_head_dim + hf.mla.v_head_dim
        per_token = hf.num_layers * hf.num_heads * width * b
    logits = rows * hf.vocab_size * (b + 3 * 4)  # of the last token; sampling works on float32
    return EmbeddedBytes(weight_bytes(hf, b), rows * longest_sampled(setup) * per_token + logits, rows)


def longest_sampled(setup: RunSetup) -> int:
    """Return the tokens of the longest sequence that a rollout engine holds, of validations too."""
    return max(setup.longest, setup.config.data.max_prompt_tokens + setup.config.validation.max_new_tokens)


def rows_of_a_rank(setup: RunSetup) -> int:
    """Return the sequences that one rank generates in a step; every rank generates its share."""
    trainer = setup.config.trainer
    return -(-trainer.prompts_per_step // setup.machine.world_size) * setup.config.rollout.n


def server_of(setup: RunSetup) -> ServerBytes:
    """Return the memory of a server on one of its devices, and its need of cache: one full sequence at least."""
    server, hf, b = setup.config.rollout.sglang.server, setup.actor.hf, setup.rollout_itemsize
    weights = weight_bytes(hf, b) // server.tp
    per_token = kv_bytes_per_token(hf, b, tp=server.tp)
    tokens = server.max_total_tokens
    if not tokens and server.mem_fraction and setup.machine.gpu_memory:
        share = round(server.mem_fraction * setup.machine.gpu_memory)
        tokens = max(0, share - weights) // per_token
    tokens = tokens or longest_sampled(setup) * wanted_sequences(setup)
    return ServerBytes(weights, tokens * per_token, SERVER_RESIDUE, tokens // longest_sampled(setup))


def wanted_sequences(setup: RunSetup) -> int:
    """Return how many full sequences a server should hold at least: what it is asked for, 16 being enough to judge."""
    return min(16, setup.config.rollout.sglang.max_concurrency)
