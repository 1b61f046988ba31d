"""Layout of gradient buffers by hand-computed examples; live buffers are compared in test_states.py."""

from __future__ import annotations

from mega_rl.plan.state.buffers import lay_out
from mega_rl.plan.state.parameters import Parameter


def parameters(*numels: int) -> tuple[Parameter, ...]:
    return tuple(Parameter(1, numel, 2) for numel in numels)


def test_parameters_lie_from_last_to_first_at_multiples_of_64() -> None:
    (buffer,) = lay_out(parameters(10, 70, 100), ranks=2, distributed=True, bucket_size=None)
    assert buffer.spans == ((0, 100), (128, 198), (256, 266))
    assert buffer.buckets == ((0, 384),)


def test_shards_end_inside_parameters() -> None:
    (buffer,) = lay_out(parameters(10, 70, 100), ranks=2, distributed=True, bucket_size=None)
    assert [buffer.owned(rank) for rank in range(2)] == [100 + 64, 6 + 10]


def test_nothing_is_padded_without_the_distributed_optimizer() -> None:
    (buffer,) = lay_out(parameters(10, 70, 100), ranks=3, distributed=False, bucket_size=None)
    assert (buffer.numel, buffer.trained, buffer.owned(2)) == (180, 180, 180)


def test_a_full_bucket_ends_at_a_multiple_of_128_and_of_the_ranks() -> None:
    (buffer,) = lay_out(parameters(10, 70, 100), ranks=3, distributed=True, bucket_size=90)
    assert buffer.buckets == ((0, 384), (384, 768))


def test_a_shared_embedding_has_a_bucket_to_itself() -> None:
    first, *others = parameters(50, 10, 10)
    shared = first._replace(shared_embedding=True)
    (buffer,) = lay_out((shared, *others), ranks=1, distributed=True, bucket_size=None)
    assert buffer.buckets == ((0, 128), (128, 256))


def test_a_dtype_has_a_buffer_to_itself() -> None:
    bf16, fp32 = parameters(10)[0], parameters(20)[0]._replace(itemsize=4)
    assert [b.trained for b in lay_out((bf16, fp32), ranks=1, distributed=True, bucket_size=None)] == [10, 20]
