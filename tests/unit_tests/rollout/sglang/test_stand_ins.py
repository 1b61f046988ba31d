"""Stand-ins: right by themselves, and still what this release of SGLang needs. In a server: test_server.py."""

from __future__ import annotations

import torch

from mega_rl.rollout.sglang.server.cpu_stand_ins import murmur_hash32


def murmur3(data: bytes, start: int = 0) -> int:
    """MurmurHash3 (x86, 32 bits) of whole words, as its author describes it."""
    assert len(data) % 4 == 0

    def rotated(x: int, bits: int) -> int:
        return (x << bits | x >> (32 - bits)) & 0xFFFFFFFF

    state = start
    for place in range(0, len(data), 4):
        word = int.from_bytes(data[place : place + 4], "little")
        state ^= rotated(word * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF
        state = (rotated(state, 13) * 5 + 0xE6546B64) & 0xFFFFFFFF
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    state = (state ^ state >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return state ^ state >> 16


def test_hash_is_murmur3_of_seed_position_token() -> None:
    generator = torch.Generator().manual_seed(0)
    edges = [0, 1, 42, 2**31, 2**32 - 1, 2**32, 2**62 + 5, 2**63 - 1, -1]
    seeds = torch.tensor([*edges, *torch.randint(2**62, (40,), generator=generator).tolist()])
    positions = torch.randint(2**31, (len(seeds),), generator=generator)
    positions[:3] = torch.tensor([0, 1, 2**31 - 1])
    tokens = torch.tensor([0, 1, 2, 50, 151935, 2**31 - 1])
    expected = [
        [
            murmur3((seed % 2**64).to_bytes(8, "little") + position.to_bytes(4, "little") + token.to_bytes(4, "little"))
            for token in tokens.tolist()
        ]
        for seed, position in zip(seeds.tolist(), positions.tolist(), strict=True)
    ]
    for given in (seeds, seeds.view(torch.uint64)):
        hashed = murmur_hash32(given, positions, tokens)
        assert hashed.dtype == torch.uint32
        assert hashed.to(torch.int64).tolist() == expected
