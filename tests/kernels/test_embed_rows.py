"""Rows that enter a model against one row at a time, and the kernel against its reference."""

from dataclasses import replace

import pytest
import torch

from espalier.errors import EspalierError
from espalier.kernels.layers.embed_rows import (
    DraftHidden,
    EmbeddingTables,
    embed_rows,
    embed_rows_reference,
    embed_rows_triton,
)
from espalier.kernels.layers.norm import rms_norm_reference
from tests.kernels.treeing import poisoned, random

VOCAB, POSITIONS = 11, 30


def drawn(batch, queries, size, seed, dtype=torch.float32, rows=None, normed_residual=False):
    """tokens and positions that are columns of wider tables, some tokens void, and what stands beside them."""
    generator = random(seed)
    exact = torch.promote_types(dtype, torch.float32)

    def normal(*shape, dtype=dtype):
        return torch.randn(shape, generator=generator).to(dtype)

    tokens = torch.randint(-1, VOCAB, (batch, queries + 2), generator=generator)[:, 1:-1]
    tokens[:, :1] = tokens[:, :1].clamp(min=0)
    positions = torch.randint(0, POSITIONS, (batch, 2 * queries), generator=generator)[:, ::2]
    tables = EmbeddingTables(normal(VOCAB, size), normal(POSITIONS, 6, dtype=exact), normal(POSITIONS, 6, dtype=exact))
    parents = None if rows is None else torch.randint(0, rows, (batch, queries), generator=generator)
    hidden = normal(batch, queries if rows is None else rows, size)
    return (
        tokens,
        positions,
        tables,
        DraftHidden(hidden, parents, normal(size), 1e-5, normal(size), 1e-3, normed_residual),
    )


def moved(value, device):
    return value.to(device) if isinstance(value, torch.Tensor) else value


def to(given, device):
    tokens, positions, tables, beside = given
    parts = [None if part is None else replace(part, **{k: moved(v, device) for k, v in vars(part).items()})
             for part in (tables, beside)]  # fmt: skip
    return tokens.to(device), positions.to(device), *parts


@pytest.mark.parametrize("rows", [None, 3])
@pytest.mark.parametrize("normed_residual", [False, True])
def test_the_reference_is_each_row_by_itself(rows, normed_residual):
    tokens, positions, tables, beside = given = drawn(3, 5, 8, 0, rows=rows, normed_residual=normed_residual)
    entered = embed_rows_reference(*given)
    for b in range(3):
        for q in range(5):
            n = b * 5 + q
            token = int(tokens[b, q]) if tokens[b, q] >= 0 else int(tokens[b, 0])
            hidden = beside.hidden[b, q if rows is None else int(beside.parents[b, q])]
            normed = rms_norm_reference(hidden, beside.hidden_norm, beside.hidden_eps)
            embedded = rms_norm_reference(tables.embed[token], beside.embed_norm, beside.embed_eps)
            torch.testing.assert_close(entered.x[n], torch.cat((embedded, normed)))
            torch.testing.assert_close(entered.residual[n], normed if normed_residual else hidden)
            assert torch.equal(entered.cos[n], tables.cos[positions[b, q]])
            assert torch.equal(entered.sin[n], tables.sin[positions[b, q]])
            assert torch.equal(embed_rows_reference(*given[:3]).x[n], tables.embed[token])


def check(device, batch, queries, size, dtype, rows):
    for seed in range(3):
        given = drawn(batch, queries, size, seed, dtype, rows, normed_residual=seed == 1)
        for beside in (None, given[3]):
            placed = to((*given[:3], beside), device)
            with poisoned():
                got = embed_rows_triton(*placed)
            expected = embed_rows_reference(*given[:3], beside)
            for name, value in got._asdict().items():
                wanted = getattr(expected, name)
                assert value.dtype == wanted.dtype, name
                # Of a norm within an ulp or two; all else is copied.
                exact = beside is None or name in ("cos", "sin") or (name == "residual" and seed != 1)
                close = {"rtol": 0, "atol": 0} if exact else {}
                torch.testing.assert_close(value.cpu(), wanted, **close)


SMALL = [(0, 2, 4, torch.float32, None), (1, 1, 5, torch.float32, None), (2, 3, 8, torch.bfloat16, 2)]
SMALL += [(3, 2, 16, torch.float64, 1), (1, 4, 8, torch.float32, 4)]


@pytest.mark.parametrize("batch,queries,size,dtype,rows", SMALL)
def test_kernel_is_the_reference(kernel_device, batch, queries, size, dtype, rows):
    check(kernel_device, batch, queries, size, dtype, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("batch,queries,rows", [(1, 8, 8), (64, 4, None), (64, 8, 1), (3, 129, 17)])
def test_kernel_is_the_reference_at_size(kernel_device, batch, queries, rows):
    check(kernel_device, batch, queries, 4096, torch.bfloat16, rows)


def test_what_does_not_fit_is_refused(kernel_device):
    tokens, positions, tables, beside = to(drawn(2, 3, 8, 0, rows=2), kernel_device)
    with pytest.raises(EspalierError, match="enter: positions"):
        embed_rows_triton(tokens, positions[:, 1:], tables, beside)
    with pytest.raises(EspalierError, match="enter: hidden"):
        embed_rows_triton(tokens, positions, tables, replace(beside, parents=None))
    with pytest.raises(EspalierError, match="must be contiguous"):
        embed_rows_triton(tokens, positions, replace(tables, embed=tables.embed.T.contiguous().T), beside)


def test_a_cpu_needs_no_kernel():
    given = drawn(2, 3, 8, 1)
    assert all(map(torch.equal, embed_rows(*given), embed_rows_reference(*given)))
