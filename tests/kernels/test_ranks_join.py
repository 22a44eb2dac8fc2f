"""The kernels by which ranks join, rank after rank in one process: what they give all ranks, to the bit.

Here nobody waits (`_meet`), so each rank runs again until the others have written what it reads.  On GPUs ranks meet in
tests/gpu/test_ranks.py.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from espalier.kernels.ops.linear import sum_parts
from espalier.kernels.ops.norm import add_rms_norm
from espalier.kernels.ranks.collectives import FLAGS_BYTES, CountedAnew, PeerCollectives, PeerMemory, two_shot
from espalier.sampling.logit_processors import SamplingNeeds
from espalier.sampling.pick import SampledTokens, pick
from espalier.shards.base import Shards, only_best

EPS = 1e-5
SLOT, PROGRAMS = 1024, 2


@pytest.fixture
def join(kernel_device, monkeypatch):
    if kernel_device.type == "cuda":
        pytest.skip("the interpreter's")
    from espalier.kernels.ranks import join

    monkeypatch.setattr(join, "PROGRAMS", PROGRAMS)
    monkeypatch.setattr(join, "GATHERED", 16)
    monkeypatch.setattr(join, "_meet", lambda *_: None)
    return join


def memories(count: int) -> list[PeerMemory]:
    """Of each rank.  All are in the storage of `addresses`, which the interpreter allows kernels to reach."""
    size = (FLAGS_BYTES + 4 * PROGRAMS * SLOT) // 8
    storage = torch.zeros(count * size + count, dtype=torch.int64)
    addresses = storage[-count:]
    addresses.copy_(torch.tensor([storage[rank * size :].data_ptr() for rank in range(count)]))
    uses, stop = torch.zeros(PROGRAMS, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    return [PeerMemory(rank, count, SLOT, addresses, uses.clone(), stop) for rank in range(count)]


def on_all(ranks: Sequence[PeerMemory], run: Callable[[PeerMemory], Any]) -> list[Any]:
    """What each rank gets once all have written: three times, because two-shot ranks meet twice."""
    for _ in range(2):
        for rank in ranks:
            before = rank.uses.clone()
            run(rank)
            rank.uses.copy_(before)
    return [run(rank) for rank in ranks]


def empty(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(like), torch.empty_like(like)


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
def test_a_sum_alone_and_in_the_norm(join, count, size, two_shot, dtype, splits):
    """Rows that programs take in turn, in both slots.  float16: the interpreter rounds bfloat16 to zero."""
    ranks, rows = memories(count), 3
    exact = torch.promote_types(dtype, torch.float32)
    residual, weight = normal(rows, size, dtype=dtype, seed=90), normal(size, dtype=dtype, seed=91)
    for use in range(2):
        shape, of_parts = ((splits, rows, size), exact) if splits else ((rows, size), dtype)
        parts = [normal(*shape, dtype=of_parts, seed=10 * use + rank) for rank in range(count)]
        own = [sum_parts.reference(each, dtype).to(exact) for each in parts]
        total = own[0].clone()
        for each in own[1:]:
            total += each
        wanted = total.to(dtype)
        assert join.most_summed(ranks[0], parts[0], dtype) >= rows
        if not use:
            sums = on_all(ranks, lambda rank, parts=parts: join.sum_rows(rank, parts[rank.rank], dtype, two_shot))
            assert all(torch.equal(each, wanted) for each in sums)
            continue
        added, norm = add_rms_norm.reference(wanted, residual, weight, EPS)
        for one, other in on_all(
            ranks,
            lambda rank, parts=parts: join.sum_add_norm(
                rank, parts[rank.rank], residual, weight, EPS, two_shot, empty(residual)
            ),
        ):
            assert torch.equal(one, added)
            torch.testing.assert_close(other, norm, rtol=4 * torch.finfo(dtype).eps, atol=0)
    assert all(rank.uses.tolist() == [2, 2] for rank in ranks)


@pytest.mark.parametrize(("count", "vocab_size"), [(2, 32), (2, 75), (3, 100)])
def test_gathered_columns(join, count, vocab_size):
    ranks = memories(count)
    logits = normal(3, vocab_size, dtype=torch.bfloat16, seed=7)
    parts = [Shards(rank, count).tokens(vocab_size).slice for rank in range(count)]
    each = Shards(0, count).tokens_each(vocab_size)
    own = [logits[:, part] for part in parts]
    assert join.most_gathered(ranks[0], own[0], each) >= 3
    for got in on_all(ranks, lambda rank: join.gather_columns(rank, own[rank.rank], each, vocab_size)):
        assert torch.equal(got, logits)


def hard_logits(rows: int, vocab_size: int, seed: int) -> torch.Tensor:
    """Ties, both zeros, infinities, NaN."""
    values = torch.tensor([-2.0, -0.0, 0.0, 1.0, 3.0, float("-inf"), float("inf"), float("nan")])
    odds = torch.tensor([4, 4, 4, 2, 0.2, 4, 0.05, 0.05])
    drawn = torch.multinomial(odds, rows * vocab_size, True, generator=torch.Generator().manual_seed(seed))
    return values[drawn].view(rows, vocab_size).to(torch.bfloat16)


def greedy(logits: torch.Tensor) -> SampledTokens:
    return pick(logits[None], None, SamplingNeeds(), torch.zeros(1, len(logits), dtype=torch.int64), None)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(2, 3), st.integers(1, 70), st.integers(1, 3), st.integers(1, 2), st.data())
def test_the_best_of_gathered_columns_is_that_of_all(join, count, vocab_size, batch, rows_each, data):
    """Its value and the first of its places; the rows that are read are whole.  All ranks hold the same bits."""
    ranks, rows = memories(count), batch * rows_each
    logits = hard_logits(rows, vocab_size, data.draw(st.integers(0, 2**32)))
    needed = torch.tensor(data.draw(st.lists(st.integers(0, 1), min_size=batch, max_size=batch)))
    shards = [Shards(rank, count) for rank in range(count)]
    each, own = shards[0].tokens_each(vocab_size), [logits[:, rank.tokens(vocab_size).slice] for rank in shards]
    first, *others = on_all(ranks, lambda rank: join.gather_columns(rank, own[rank.rank], each, vocab_size, needed))
    assert all(same_bits(first, other) for other in others)
    joined = torch.cat([only_best(part, needed) for part in own], 1)
    is_whole = needed.repeat_interleave(rows_each) != 0
    for found in (first, joined):
        assert same_bits(found[is_whole], logits[is_whole])
        assert all(map(torch.equal, greedy(found), greedy(logits)))


class NoNccl:
    """Whatever is left to NCCL fails."""


def test_more_rows_than_fit_are_joined_in_pieces(join):
    """In two here, of unequal lengths: 64 and 6 rows of logits, 4 and 3 of a sum."""
    ranks = memories(2)
    peers = [PeerCollectives(rank, cast(Any, NoNccl())) for rank in ranks]
    logits, needed = hard_logits(70, 20, 3), torch.tensor([0, 1] * 5)
    own = [logits[:, :10].contiguous(), logits[:, 10:].contiguous()]
    wanted = torch.cat([only_best(part, needed) for part in own], 1)
    assert join.most_gathered(ranks[0], own[0], 10) == 64
    for found in on_all(ranks, lambda rank: peers[rank.rank].gather_columns(own[rank.rank], 10, 20, needed)):
        assert same_bits(found, wanted)
    parts = [normal(7, 256, dtype=torch.float16, seed=rank) for rank in range(2)]
    residual, weight = normal(7, 256, dtype=torch.float16, seed=2), normal(256, dtype=torch.float16, seed=3)
    added, norm = add_rms_norm.reference((parts[0].float() + parts[1].float()).half(), residual, weight, EPS)
    given = residual, weight, EPS
    for found in on_all(ranks, lambda rank: peers[rank.rank].all_reduce_add_norm(parts[rank.rank], *given)):
        assert torch.equal(found[0], added)
        torch.testing.assert_close(found[1], norm, rtol=4 * torch.finfo(torch.float16).eps, atol=0)
    many = torch.empty(1400, 256, dtype=torch.float16)
    two_shot_peer = PeerCollectives(memories(4)[0], cast(Any, NoNccl()))
    assert two_shot_peer.all_reduce_add_norm(many, many, weight, EPS) is None


def test_a_slot_is_kept_while_the_next_use_runs(join):
    """A rank may still read it."""
    [rank] = memories(1)
    first, second = (normal(1, 32, dtype=torch.float64, seed=seed) for seed in (1, 2))
    area = rank.addresses.untyped_storage()
    join.sum_rows(rank, first, torch.float64, False)
    join.sum_rows(rank, second, torch.float64, False)
    values = torch.tensor([], dtype=torch.float64).set_(area)[FLAGS_BYTES // 8 :]
    assert torch.equal(values[:32], first[0]) and torch.equal(values[PROGRAMS * SLOT // 8 :][:32], second[0])


def test_what_does_not_fit_is_left_to_others(join):
    [rank] = memories(1)
    for size, most in ((256, 2 * PROGRAMS), (512, PROGRAMS), (4, 0), (520, 0)):
        assert join.most_summed(rank, torch.empty(1, size, dtype=torch.bfloat16), torch.bfloat16) == most, size
    for each, most in ((16, 32 * PROGRAMS), (17, 16 * PROGRAMS), (16 * 65, 0)):
        assert join.most_gathered(rank, torch.empty(1, each, dtype=torch.bfloat16), each) == most, each


def test_a_rendezvous_counts_from_the_first_step():
    """In a process that has made some before, as in a new one."""
    from torch.distributed import HashStore, PrefixStore

    base = HashStore()
    base.set_timeout(timedelta(seconds=5))
    old, new = CountedAnew(base), CountedAnew(base)
    for step in range(2):
        PrefixStore(f"memory/{7 + step}", old).set("0", f"of {step}")
        reader = PrefixStore(f"memory/{step}", new)
        reader.wait(["0"])
        assert reader.get("0") == f"of {step}".encode()


@pytest.mark.parametrize(("count", "one_shot", "is_two_shot"), [(2, 2048, None), (4, 64, 128), (8, 16, 64)])
def test_a_sum_is_two_shot_where_reading_less_is_worth_a_meeting(count, one_shot, is_two_shot):
    """Of rows of 4,096 values.  Two ranks read as much both ways."""
    assert not two_shot(torch.empty(one_shot, 4096, device="meta"), torch.bfloat16, count)
    if is_two_shot is not None:
        assert two_shot(torch.empty(is_two_shot, 4096, device="meta"), torch.bfloat16, count)
