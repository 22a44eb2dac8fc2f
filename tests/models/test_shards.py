"""Parts of matrices, in every weight format; products over them, in every form; and models that cannot be divided."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from espalier.config import EngineConfig
from espalier.errors import EspalierError
from espalier.kernels.layers.blocks import BLOCK_TYPES, BlockMatrix, dequantise_blocks
from espalier.kernels.layers.quantised import InputScales, QuantisedMatrix, RoundedRows, dequantise, quantise_inputs
from espalier.kernels.ops.drafts import DraftHidden
from espalier.kernels.ops.linear import add_partial_sums
from espalier.llm import prepare_engine
from espalier.models.declared_weights import require_shards
from espalier.models.layer_loading import load_layer
from espalier.models.layers.linear import Embedding, Linear
from espalier.models.loading import read_config
from espalier.models.weight_formats import dense_weight, read_formats
from espalier.models.weight_formats.dense import DenseFormat
from espalier.models.weight_formats.quantised import QuantisedWeight
from espalier.models.weight_formats.sharded import GatheredWeight, SummedWeight, sum_over_ranks
from espalier.models.weights import Weights
from espalier.shards import SINGLE_RANK, RankPart, Shards
from espalier.shards.base import Collectives
from espalier.speculate.drafters.registry import draft_shards, read_draft
from tests.builders import make_eagle3, make_target
from tests.checkpoints import edit_config
from tests.gguf import blocks_of
from tests.quantised import KINDS, ORDERED

ROWS, COLUMNS = 64, 96
ROTATION = torch.zeros(1, 2, dtype=torch.float64)


class ThreadCollectives(Collectives):
    """Joins ranks that are threads."""

    def __init__(self, barrier: Barrier, given: list[Any], rank: int) -> None:
        self.barrier, self.given, self.rank = barrier, given, rank

    def all_gather(self, x: Tensor) -> Tensor:
        self.given[self.rank] = x
        self.barrier.wait(10)
        gathered = torch.stack(self.given)
        self.barrier.wait(10)
        return gathered

    def all_reduce(self, x: Tensor) -> Tensor:
        return add_partial_sums.reference(self.all_gather(x), x.dtype)

    def abort(self) -> None:
        pass


def on_ranks(count: int, work: Callable[[Shards], Any]) -> list[Any]:
    barrier, given, results = Barrier(count), [None] * count, [None] * count

    def run(rank: int) -> None:
        results[rank] = work(Shards(rank, count, ThreadCollectives(barrier, given, rank)))

    threads = [Thread(target=run, args=(rank,)) for rank in range(count)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(20)
    return results


def stored(kind: str, folder: Path) -> tuple[Weights, Tensor]:
    """A matrix in this format, and what it means."""
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    parts, meant = ({"weight": weight}, weight) if kind == "dense" else KINDS[kind][1](weight)
    save_file({f"a.{suffix}": part for suffix, part in parts.items()}, folder / "model.safetensors")
    config = {} if kind == "dense" else {"quantization_config": KINDS[kind][0]}
    return Weights(folder, torch.float64, "cpu", read_formats(config)), meant


def dense(matrix: Tensor | QuantisedMatrix) -> Tensor:
    return matrix if isinstance(matrix, Tensor) else dequantise(matrix, torch.float64)


@pytest.mark.parametrize("kind", ["dense", *KINDS])
@pytest.mark.parametrize("count", [2, 3])
def test_the_parts_of_a_matrix_are_the_matrix(kind, count, tmp_path):
    """Along rows and along columns.  A part that cannot be cut out is refused; no other is."""
    weights, meant = stored(kind, tmp_path)
    for dim, size in enumerate((ROWS, COLUMNS)):
        parts = [RankPart(size * rank // count, size * (rank + 1) // count, size) for rank in range(count)]
        sizes = [(part, COLUMNS) if dim == 0 else (ROWS, part) for part in parts]
        unit = unit_of(kind, dim)
        if unit is None or any(part.begin % unit for part in parts):
            with pytest.raises(EspalierError, match=r"'a' in .*(cannot be cut out|cannot be divided among ranks)"):
                [weights.matrix(["a"], [rows], columns) for rows, columns in sizes]
            continue
        read = [dense(weights.matrix(["a"], [rows], columns)) for rows, columns in sizes]
        torch.testing.assert_close(torch.cat(read, dim), meant, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("type", ["Q8_0", "Q4_K"])
def test_the_parts_of_blocks_are_the_matrix(type, tmp_path):
    kind, rows = BLOCK_TYPES[type], 6
    columns = 3 * kind.block_values
    blocks = blocks_of(type, rows, columns)
    save_file({"a.weight": blocks.view(rows, 3, kind.block_bytes)}, tmp_path / "model.safetensors")
    formats = read_formats({"quantization_config": {"quant_method": "gguf", "types": {"a": type}}})
    weights, x = Weights(tmp_path, torch.float64, "cpu", formats), torch.eye(columns, dtype=torch.float64)
    meant = dequantise_blocks(BlockMatrix(kind, blocks)).double()
    of_rows = [weights.weight(["a"], [RankPart(2 * i, 2 * i + 2, rows)], columns).apply(x, None).T for i in range(3)]
    own = [RankPart(i * kind.block_values, (i + 1) * kind.block_values, columns) for i in range(3)]
    unit = torch.eye(kind.block_values, dtype=torch.float64)
    of_columns = [weights.weight(["a"], [rows], part).apply(unit, None).T for part in own]
    assert torch.equal(torch.cat(of_rows), meant) and torch.equal(torch.cat(of_columns, 1), meant)
    with pytest.raises(EspalierError, match=r"'a' in .*cannot be cut out"):
        weights.weight(["a"], [rows], RankPart(0, 16, columns))


def unit_of(kind: str, dim: int) -> int | None:
    """Rows (dim 0) or columns that are stored together; None: columns are in no order."""
    if "fp8" in kind:
        return {"fp8-block": 16, "fp8-block-32": 32}.get(kind, 1)
    if dim == 0:
        return 8 if kind.startswith(("awq", "gptq", "packed-channel-zeros")) else 1
    if kind in ORDERED:
        return None
    return {"dense": 1, "packed-channel-zeros": 8}.get(kind, 16)


def test_only_the_part_of_a_file_is_copied(tmp_path, monkeypatch):
    weights, _ = stored("dense", tmp_path)
    copied = []
    right = Tensor.copy_
    monkeypatch.setattr(Tensor, "copy_", lambda self, other: copied.append(other.shape) or right(self, other))
    weights.weight(["a"], [RankPart(0, 16, ROWS)], COLUMNS)
    assert copied == [(16, COLUMNS)]


@given(st.integers(1, 4), st.integers(1, 40), st.integers(1, 5))
def test_the_parts_of_a_vocabulary_are_the_vocabulary(count, vocab, unit):
    parts = [Shards(rank, count).vocab_part(vocab) for rank in range(count)]
    assert [token for part in parts for token in range(vocab)[part.slice]] == list(range(vocab))
    assert all(len(part) <= Shards(0, count).max_tokens_per_rank(vocab) for part in parts)
    times = [part.scaled(unit) for part in parts]
    assert [part.in_blocks_of(unit) for part in times] == parts


@pytest.mark.parametrize(("heads", "count"), [(1, 3), (2, 4), (3, 3), (6, 2), (4, 1)])
def test_kv_heads_are_divided_or_held_by_several(heads, count):
    """Query heads are contiguous parts: a rank's are those of its K/V heads."""
    queries = 12
    for rank in range(count):
        shards = Shards(rank, count)
        own = range(queries)[shards.part(queries, "heads").slice]
        assert {query * heads // queries for query in own} == set(range(heads)[shards.kv_heads_part(heads).slice])


FORMS: dict[str, Callable[[Linear, Tensor], Tensor]] = {
    "call": lambda layer, x: layer(x),
    "call-3d": lambda layer, x: layer(x[None]),
    "in_parts": lambda layer, x: add_partial_sums.reference(layer.partial_sums(x), x.dtype),
    "residual_delta": lambda layer, x: add_partial_sums.reference(sum_over_ranks(layer.residual_delta(x)), x.dtype),
    "gated": lambda layer, x: layer.activated_product(x),
    "write_partial_sums": lambda layer, x: written(layer, x),
    "rows_from": lambda layer, x: layer.rows_from(2)(x),
    "rounded": lambda layer, x: layer(rounded(x)),
    "rounded-parts": lambda layer, x: layer.partial_sums(rounded(x)),
    "rounded-stream": lambda layer, x: add_partial_sums.reference(
        sum_over_ranks(layer.residual_delta(rounded(x))), x.dtype
    ),
    "rounded-gated": lambda layer, x: layer.activated_product(rounded(x)),
}
INPUTS = InputScales(4)


def written(layer: Linear, x: Tensor) -> Tensor:
    out = x.new_empty(layer.weight.num_partial_sums(len(x)), len(x), layer.shape[0])
    layer.write_partial_sums(x, out)
    return add_partial_sums.reference(out, x.dtype)


def rounded(x: Tensor) -> RoundedRows:
    return RoundedRows(*quantise_inputs(x, INPUTS), x.dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [2, 3])
def test_a_product_of_parts_is_the_product_in_each_of_its_forms(form, count):
    """Parts of the columns, which are summed, and of the rows, which are joined; the bias is added once."""
    draw = torch.Generator().manual_seed(7)
    weight, x = (torch.randn(size, generator=draw, dtype=torch.float64) for size in ((10, 24), (5, 24)))
    bias = torch.randn(10, generator=draw, dtype=torch.float64)

    def made(tensor: Tensor) -> Any:
        if not form.startswith("rounded"):
            return dense_weight(tensor)
        scales = torch.ones(len(tensor), 1, dtype=torch.float64)
        codes = tensor.to(torch.float8_e4m3fn)
        return QuantisedWeight(QuantisedMatrix("fp8", codes, scales, tensor.shape[1], input_scales=INPUTS), "fp8")

    def summed(shards: Shards) -> Tensor:
        part = shards.part(24, "columns").slice
        own = SummedWeight(made(weight[:, part].contiguous()), shards, 10)
        return FORMS[form](Linear(own, bias), x[:, part].contiguous())

    def joined(shards: Shards) -> Tensor:
        own = made(weight[shards.vocab_part(10).slice].contiguous())
        return FORMS[form](Linear(GatheredWeight(own, shards, 10), bias), x)

    expected = FORMS[form](Linear(made(weight), bias), x)
    for of_rank in (summed, joined):
        for result in on_ranks(count, of_rank):
            torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("count", "vocab"), [(2, 10), (3, 10), (3, 4), (4, 2)])
@pytest.mark.parametrize("is_draft", [False, True])
def test_an_embedding_of_parts_gives_the_rows_of_the_whole(count, vocab, is_draft):
    """Parts of unequal lengths, also empty; void tokens, which have the row of their request's first token."""
    weight, rope = torch.randn(vocab, 6, dtype=torch.float64), SimpleNamespace(cos=ROTATION, sin=ROTATION)
    tokens = torch.tensor([[vocab - 1, -1, 0], [1, vocab // 2, -1]])
    hidden = torch.randn(2, 3, 6, dtype=torch.float64)
    beside = DraftHidden(hidden, None, torch.ones(6), 1e-6, torch.ones(6), 1e-6, False) if is_draft else None
    passed = SimpleNamespace(tokens=tokens, positions=torch.zeros_like(tokens), store_rotation=lambda *_: None)

    def of(embed: Embedding) -> tuple[Tensor, Tensor]:
        stream = embed(passed, rope, beside)
        return stream.x if stream.first_input is None else stream.first_input, stream.live

    def rows(shards: Shards) -> Any:
        embed = Embedding(weight[shards.vocab_part(vocab).slice], 1.0, None, vocab, shards)
        divided = of(embed)
        embed.gather_all_rows()
        return divided, of(embed), embed.weight, embed.shape

    expected, live = of(Embedding(weight))
    for divided, joined, whole, shape in on_ranks(count, rows):
        for found, found_live in (divided, joined):
            assert torch.equal(found, expected) and torch.equal(found_live, live)
        assert torch.equal(whole, weight) and shape == weight.shape


def quantised(path: Path, config: dict[str, Any]) -> None:
    edit_config(path, quantization_config=config)


REFUSED = [
    ("llama", {}, None, 3, r"does not divide this model's number of attention heads \(4\); use 1 or 2"),
    ("llama", {"heads": 6, "hidden": 48}, None, 3, r"tensor_parallel=3 .* number of K/V heads \(2\); use 1 or 2"),
    ("llama", {"intermediate_size": 65}, None, 2, r"tensor_parallel=2 .* intermediate size \(65\); use 1$"),
    ("llama", {"intermediate_size": 60, "heads": 8, "kv_heads": 8}, None, 5, r"heads \(8\); use 1 or 2 or 4$"),
    ("qwen3_moe", {"moe_intermediate_size": 25}, None, 2, r"intermediate size of experts \(25\)"),
    ("qwen2_moe", {"shared_expert_intermediate_size": 21}, None, 2, r"intermediate size \(21\)"),
    ("gpt_oss", {"intermediate_size": 32}, {"quant_method": "mxfp4"}, 2, "experts.*': entries 0 to 15 of 32 cannot"),
    ("llama", {"intermediate_size": 96}, KINDS["fp8-block-32"][0], 2, "tensor_parallel=2, .* 32 are stored as one"),
    ("llama", {}, KINDS["gptq-v2-ordered"][0], 2, "tensor_parallel=2 is not supported with desc_act"),
    ("phi3", {"intermediate_size": 96}, KINDS["fp8-block-32"][0], 2, "qkv_proj': entries 0 to 15 of 64 cannot"),
    ("laguna", {"num_attention_heads_per_layer": [4, 2, 6]}, None, 4, r"number of attention heads \(2\); use 1 or 2"),
    ("granitemoe", {"intermediate_size": 65}, None, 2, r"tensor_parallel=2 .* intermediate size of experts \(65\)"),
    ("qwen3_next", {}, None, 2, "tensor_parallel=2 is not supported for layers that keep a state; use 1"),
    ("lfm2", {}, None, 2, "tensor_parallel=2 is not supported for layers that keep a state; use 1"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "sizes", "format", "count", "says"), REFUSED)
def test_a_model_that_ranks_cannot_divide_is_refused_before_its_weights_are_read(
    family, sizes, format, count, says, tmp_path
):
    path = make_target(tmp_path / "target", family, **sizes)
    if format is not None:
        quantised(path, format)
    (path / "model.safetensors").write_bytes(b"not read")
    require_shards(read_config(path), 1)
    with pytest.raises(EspalierError, match=says) as refused:
        prepare_engine(EngineConfig(model=path, tensor_parallel=count, dtype="float32", speculation=None))
    assert "\n" not in str(refused.value)
    for number in re.findall(r"\d+", str(refused.value).rpartition("; use ")[2]):
        require_shards(read_config(path), int(number))


def test_a_model_that_transformers_runs_is_refused(tmp_path):
    path = make_target(tmp_path / "target")
    with pytest.raises(EspalierError, match="tensor_parallel=2 is not supported for models that transformers runs"):
        prepare_engine(EngineConfig(model=path, tensor_parallel=2, model_impl="transformers", speculation=None))


def test_a_format_without_parts_is_refused_by_name(tmp_path):
    class Whole(DenseFormat):
        name = "whole"
        supports_shards = False

    config = replace(read_config(make_target(tmp_path / "target")), formats=lambda name: Whole())
    with pytest.raises(EspalierError, match="q_proj': format whole cannot be divided among ranks; use tensor_par"):
        require_shards(config, 2)


def test_a_matrix_of_which_nobody_says_a_part_is_refused_by_name(tmp_path):
    """A family's own layer, which knows nothing of ranks."""

    def own_layer(weights, config, prefix, layer, rope):
        made = load_layer(weights, config, prefix, layer, rope)
        made.attention.out = weights.linear(f"{prefix}self_attn.", ("o_proj",), (config.hidden_size,), 32, bias=False)
        return made

    config = read_config(make_target(tmp_path / "target"))
    config = replace(config, family=replace(config.family, load_layer=own_layer))
    require_shards(config, 1)
    with pytest.raises(EspalierError, match=r"layers.0.self_attn.o_proj' has no part, so ranks cannot .*parallel=1"):
        require_shards(config, 2)


@pytest.mark.parametrize(
    ("sizes", "count"),
    [({}, 2), ({"intermediate_size": 65}, 1), ({"num_attention_heads": 6, "num_key_value_heads": 3}, 1)],
)
def test_a_draft_that_the_ranks_cannot_divide_is_whole_on_each(sizes, count, tmp_path):
    target = read_config(make_target(tmp_path / "target"))
    draft = read_draft(make_eagle3(tmp_path / "draft", tmp_path / "target", **sizes), target)
    assert draft_shards(draft, Shards(1, 2)) == (Shards(1, 2) if count == 2 else SINGLE_RANK)


class Card:
    def __init__(self, name: str, gib: int) -> None:
        self.name, self.total_memory = name, gib << 30


@pytest.mark.parametrize(
    ("device", "count", "cards", "says"),
    [
        ("cuda", 4, [Card("H100", 80)] * 2, "tensor_parallel=4 needs as many GPUs, and PyTorch finds 2; lower it"),
        ("auto", 4, [Card("H100", 80)] * 2, "tensor_parallel=4 needs as many GPUs, and PyTorch finds 2; lower it"),
        ("cuda", 2, [Card("H100", 80), Card("A100", 40)], r"equal GPUs, but these are A100 \(40 GiB\) and H100 \(80"),
        ("cuda:1", 2, [Card("H100", 80)] * 2, "device='cuda:1' with tensor_parallel=2 .* the GPUs 0 to 1; use cuda"),
    ],
)
def test_gpus_that_do_not_fit_are_refused(device, count, cards, says, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: cards[index])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    path = make_target(tmp_path / "target", heads=8, kv_heads=4)
    with pytest.raises(EspalierError, match=says):
        prepare_engine(EngineConfig(model=path, tensor_parallel=count, device=device, speculation=None))
