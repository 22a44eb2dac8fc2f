"""The collective kernels, rank after rank in one process: what they give all ranks, to the bit.

Here nobody waits (`_barrier`), so each rank runs again until the others have written what it reads.  On GPUs ranks meet
in tests/gpu/test_ranks.py.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch

from espalier.kernels.ops.linear import add_partial_sums
from espalier.kernels.ops.norm import add_rms_norm
from espalier.kernels.ranks.collectives import FLAGS_BYTES, PeerMemory, RestartedStepStore, uses_two_shot
from espalier.shards.base import Shards

EPS = 1e-5
SLOT_BYTES, MAX_PROGRAMS = 1024, 2


@pytest.fixture
def kernels(kernel_device, monkeypatch):
    if kernel_device.type == "cuda":
        pytest.skip("the interpreter's")
    from espalier.kernels.ranks import collective_kernels

    monkeypatch.setattr(collective_kernels, "MAX_PROGRAMS", MAX_PROGRAMS)
    monkeypatch.setattr(collective_kernels, "GATHER_BLOCK", 16)
    monkeypatch.setattr(collective_kernels, "_barrier", lambda *_: None)
    return collective_kernels


def memories(count: int) -> list[PeerMemory]:
    """Of each rank.  All are in the storage of `addresses`, which the interpreter allows kernels to reach."""
    size = (FLAGS_BYTES + 4 * MAX_PROGRAMS * SLOT_BYTES) // 8
    storage = torch.zeros(count * size + count, dtype=torch.int64)
    addresses = storage[-count:]
    addresses.copy_(torch.tensor([storage[rank * size :].data_ptr() for rank in range(count)]))
    uses, stop = torch.zeros(MAX_PROGRAMS, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    return [PeerMemory(rank, count, SLOT_BYTES, addresses, uses.clone(), stop) for rank in range(count)]


def on_all(ranks: Sequence[PeerMemory], run: Callable[[PeerMemory], Any]) -> list[Any]:
    """What each rank gets once all have written: three times, because two-shot ranks meet twice."""
    for _ in range(2):
        for rank in ranks:
            before = rank.num_launches.clone()
            run(rank)
            rank.num_launches.copy_(before)
    return [run(rank) for rank in ranks]


def normal(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


CASES = [
    (count, size, two_shot, dtype, splits)
    for count, size in ((2, 32), (3, 48), (4, 64), (3, 40))
    for two_shot in (False, True)
    for dtype, splits in ((torch.float16, 0), (torch.float16, 2), (torch.float64, 0))
]
QUICK = (1, 3, 9, 23)


@pytest.mark.parametrize(
    ("count", "size", "two_shot", "dtype", "splits"),
    [pytest.param(*case, marks=[] if i in QUICK else pytest.mark.full) for i, case in enumerate(CASES)],
    ids=str,
)
def test_a_sum_alone_and_in_the_norm(kernels, count, size, two_shot, dtype, splits):
    """Rows that programs take in turn, in both slots.  float16: the interpreter rounds bfloat16 to zero."""
    ranks, rows = memories(count), 3
    exact = torch.promote_types(dtype, torch.float32)
    residual, weight = normal(rows, size, dtype=dtype, seed=90), normal(size, dtype=dtype, seed=91)
    for use in range(2):
        shape, of_parts = ((splits, rows, size), exact) if splits else ((rows, size), dtype)
        parts = [normal(*shape, dtype=of_parts, seed=10 * use + rank) for rank in range(count)]
        own = [add_partial_sums.reference(each, dtype).to(exact) for each in parts]
        total = own[0].clone()
        for each in own[1:]:
            total += each
        wanted = total.to(dtype)
        assert kernels.supports_all_reduce(ranks[0], parts[0], dtype)
        if not use:
            sums = on_all(
                ranks, lambda rank, parts=parts: kernels.all_reduce_rows(rank, parts[rank.rank], dtype, two_shot)
            )
            assert all(torch.equal(each, wanted) for each in sums)
            continue
        added, norm = add_rms_norm.reference(wanted, residual, weight, EPS)
        for one, other in on_all(
            ranks,
            lambda rank, parts=parts: kernels.all_reduce_add_norm(
                rank, parts[rank.rank], residual, weight, EPS, two_shot
            ),
        ):
            assert torch.equal(one, added)
            torch.testing.assert_close(other, norm, rtol=4 * torch.finfo(dtype).eps, atol=0)
    assert all(rank.num_launches.tolist() == [2, 2] for rank in ranks)


@pytest.mark.parametrize(("count", "vocab_size"), [(2, 32), (2, 75), (3, 100)])
def test_gathered_columns(kernels, count, vocab_size):
    ranks = memories(count)
    logits = normal(3, vocab_size, dtype=torch.bfloat16, seed=7)
    parts = [Shards(rank, count).vocab_part(vocab_size).slice for rank in range(count)]
    each = Shards(0, count).max_tokens_per_rank(vocab_size)
    own = [logits[:, part] for part in parts]
    assert kernels.supports_gather(ranks[0], own[0], each)
    for got in on_all(ranks, lambda rank: kernels.gather_columns(rank, own[rank.rank], each, vocab_size)):
        assert torch.equal(got, logits)


def test_a_slot_is_kept_while_the_next_use_runs(kernels):
    """A rank may still read it."""
    [rank] = memories(1)
    first, second = (normal(1, 32, dtype=torch.float64, seed=seed) for seed in (1, 2))
    area = rank.addresses.untyped_storage()
    kernels.all_reduce_rows(rank, first, torch.float64, False)
    kernels.all_reduce_rows(rank, second, torch.float64, False)
    values = torch.tensor([], dtype=torch.float64).set_(area)[FLAGS_BYTES // 8 :]
    assert torch.equal(values[:32], first[0]) and torch.equal(values[MAX_PROGRAMS * SLOT_BYTES // 8 :][:32], second[0])


def test_what_does_not_fit_is_left_to_others(kernels):
    [rank] = memories(1)
    assert kernels.supports_all_reduce(rank, torch.empty(2 * MAX_PROGRAMS, 256, dtype=torch.bfloat16), torch.bfloat16)
    for rows, size in ((2 * MAX_PROGRAMS + 1, 256), (0, 256), (1, 4), (1, 520)):
        x = torch.empty(rows, size, dtype=torch.bfloat16)
        assert not kernels.supports_all_reduce(rank, x, torch.bfloat16), (rows, size)
    assert not kernels.supports_gather(rank, torch.empty(MAX_PROGRAMS * 32 + 1, 16, dtype=torch.bfloat16), 16)


def test_a_rendezvous_counts_from_the_first_step():
    """In a process that has made some before, as in a new one."""
    from torch.distributed import HashStore, PrefixStore

    base = HashStore()
    base.set_timeout(timedelta(seconds=5))
    old, new = RestartedStepStore(base), RestartedStepStore(base)
    for step in range(2):
        PrefixStore(f"memory/{7 + step}", old).set("0", f"of {step}")
        reader = PrefixStore(f"memory/{step}", new)
        reader.wait(["0"])
        assert reader.get("0") == f"of {step}".encode()


@pytest.mark.parametrize(("count", "one_shot", "is_two_shot"), [(2, 2048, None), (4, 64, 128), (8, 16, 64)])
def test_a_sum_is_two_shot_where_reading_less_is_worth_a_meeting(count, one_shot, is_two_shot):
    """Of rows of 4,096 values.  Two ranks read as much both ways."""
    assert not uses_two_shot(torch.empty(one_shot, 4096, device="meta"), torch.bfloat16, count)
    if is_two_shot is not None:
        assert uses_two_shot(torch.empty(is_two_shot, 4096, device="meta"), torch.bfloat16, count)
