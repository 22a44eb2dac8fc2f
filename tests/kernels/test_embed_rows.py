"""embed_rows: the reference equals a computation row by row, and the kernel equals the reference."""

from dataclasses import replace

import pytest
import torch

from espalier.errors import EspalierError
from espalier.kernels.ops.drafts import DraftHidden, EmbeddingTables, embed_rows
from espalier.kernels.ops.norm import rms_norm
from tests.kernels.treeing import poisoned, random

VOCAB, POSITIONS = 11, 30


def random_inputs(batch, queries, size, seed, dtype=torch.float32, rows=None, normed_residual=False):
    """embed_rows' arguments.  tokens and positions are columns of wider tensors; any token may be void."""
    generator = random(seed)
    exact = torch.promote_types(dtype, torch.float32)

    def normal(*shape, dtype=dtype):
        return torch.randn(shape, generator=generator).to(dtype)

    tokens = torch.randint(-1, VOCAB, (batch, queries + 2), generator=generator)[:, 1:-1]
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


def value_to(value, device):
    return value.to(device) if isinstance(value, torch.Tensor) else value


def record_to(record, device):
    return record and replace(record, **{name: value_to(value, device) for name, value in vars(record).items()})


def to(inputs, device):
    tokens, positions, tables, draft = inputs
    return tokens.to(device), positions.to(device), record_to(tables, device), record_to(draft, device)


@pytest.mark.parametrize("rows", [None, 3])
@pytest.mark.parametrize("normed_residual", [False, True])
def test_reference_equals_row_by_row(rows, normed_residual):
    tokens, positions, tables, draft = inputs = random_inputs(3, 5, 8, 0, rows=rows, normed_residual=normed_residual)
    x, residual, rotation, live = embed_rows.reference(*inputs)
    for b in range(3):
        for q in range(5):
            n = b * 5 + q
            token = int(tokens[b, q]) if tokens[b, q] >= 0 else max(int(tokens[b, 0]), 0)
            hidden = draft.hidden[b, q if rows is None else int(draft.parents[b, q])]
            normed = rms_norm.reference(hidden, draft.hidden_norm, draft.hidden_eps)
            embedded = rms_norm.reference(tables.embed[token], draft.embed_norm, draft.embed_eps)
            torch.testing.assert_close(x[n], torch.cat((embedded, normed)))
            torch.testing.assert_close(residual[n], normed if normed_residual else hidden)
            assert live[n] == (tokens[b, q] >= 0)
            assert torch.equal(rotation.cos[n], tables.cos[positions[b, q]])
            assert torch.equal(rotation.sin[n], tables.sin[positions[b, q]])
            assert torch.equal(embed_rows.reference(*inputs[:3])[0][n], tables.embed[token])


def test_one_hidden_row_may_serve_all_requests(kernel_device):
    """As the mask rows of P-EAGLE read it: stride 0 between requests."""
    tokens, positions, tables, draft = to(random_inputs(3, 5, 8, 1, rows=1), kernel_device)
    expanded = replace(draft, hidden=draft.hidden[:1].expand(3, -1, -1))
    whole = replace(draft, hidden=expanded.hidden.contiguous())
    for out, expected in zip(
        embed_rows.triton(tokens, positions, tables, expanded),
        embed_rows.reference(tokens, positions, tables, whole),
        strict=True,
    ):
        torch.testing.assert_close(out, expected)


def named(rows):
    x, residual, rotation, live = rows
    return {"x": x, "residual": residual, "live": live, **rotation._asdict()}


def check(device, batch, queries, size, dtype, rows):
    for seed in range(3):
        inputs = random_inputs(batch, queries, size, seed, dtype, rows, normed_residual=seed == 1)
        for draft in (None, inputs[3]):
            with poisoned():
                got = named(embed_rows.triton(*to((*inputs[:3], draft), device)))
            for name, expected in named(embed_rows.reference(*inputs[:3], draft)).items():
                assert got[name].dtype == expected.dtype, name
                # Norms are equal within two ulps; everything else is a copy.
                exact = draft is None or name in ("cos", "sin") or (name == "residual" and seed != 1)
                tolerance = {"rtol": 0, "atol": 0} if exact else {}
                torch.testing.assert_close(got[name].cpu(), expected, **tolerance)


SMALL = [(0, 2, 4, torch.float32, None), (1, 1, 5, torch.float32, None), (2, 3, 8, torch.bfloat16, 2)]
SMALL += [(3, 2, 16, torch.float64, 1), (1, 4, 8, torch.float32, 4)]


@pytest.mark.parametrize("batch,queries,size,dtype,rows", SMALL)
def test_kernel_is_the_reference(kernel_device, batch, queries, size, dtype, rows):
    check(kernel_device, batch, queries, size, dtype, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("batch,queries,rows", [(1, 8, 8), (64, 4, None), (64, 8, 1), (3, 129, 17)])
def test_kernel_is_the_reference_at_size(kernel_device, batch, queries, rows):
    check(kernel_device, batch, queries, 4096, torch.bfloat16, rows)


def test_wrong_shapes_and_strides_are_refused(kernel_device):
    tokens, positions, tables, draft = to(random_inputs(2, 3, 8, 0, rows=2), kernel_device)
    with pytest.raises(EspalierError, match="embed_rows: positions"):
        embed_rows.triton(tokens, positions[:, 1:], tables, draft)
    with pytest.raises(EspalierError, match="embed_rows: hidden"):
        embed_rows.triton(tokens, positions, tables, replace(draft, parents=None))
    with pytest.raises(EspalierError, match="must be contiguous"):
        embed_rows.triton(tokens, positions, replace(tables, embed=tables.embed.T.contiguous().T), draft)


def test_cpu_tensors_use_the_reference():
    inputs = random_inputs(2, 3, 8, 1)
    torch.testing.assert_close(embed_rows(*inputs), embed_rows.reference(*inputs), rtol=0, atol=0)
