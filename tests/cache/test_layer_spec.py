"""What a layer keeps is declared once: planes and how they are read, bytes, groups, and states that no page holds."""

from dataclasses import replace

import pytest
import torch

from espalier.attention import grouped_backend
from espalier.cache.kv import PagedKV, RecurrentStates, StagedKV, bytes_beside_pages, bytes_per_token
from espalier.cache.layer_spec import KVHeads, LatentKV, LayerSpec, RecurrentState, groups_of, stored_as
from espalier.errors import EspalierError
from espalier.kernels.layers.quantised import FP8
from espalier.startup.build import require_reentry
from tests.harness import Setup
from tests.test_config import FACTS, resolved

CPU = torch.device("cpu")
HEADS, LATENT = LayerSpec(4, KVHeads(2, 8, 6)), LayerSpec(4, LatentKV(24, 16))
# A state that the commit makes anew from each node's inputs.
RECURRENT = LayerSpec(4, RecurrentState((("state", (4, 8, 3)), ("window", (5,))), (("inputs", (7,)),)))
SPECS = (HEADS, RECURRENT, LATENT, RECURRENT, HEADS)
LAYOUT = Setup(page_size=4, max_batch=3).layout


def test_planes_are_read_as_k_and_v():
    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 6)
    assert HEADS.rows.read((k, v)) == (k, v)
    latent = torch.randn(3, 1, 24)
    keys, values = LATENT.rows.read((latent,))
    assert keys is latent and torch.equal(values, latent[..., :16])
    assert values.data_ptr() == latent.data_ptr()
    with pytest.raises(EspalierError, match="a recurrent layer keeps no rows"):
        _ = RECURRENT.rows


def test_layers_that_keep_the_same_are_a_group():
    windowed = replace(HEADS, window=3)
    groups = groups_of((HEADS, LATENT, windowed, RECURRENT), range(4))
    assert list(groups.items()) == [(HEADS.keeps, (0, 2)), (LATENT.keeps, (1,)), (RECURRENT.keeps, (3,))]


def test_pools_and_staging_follow_from_what_layers_keep():
    pages = PagedKV(LAYOUT, 5, SPECS, len(SPECS), torch.float32, CPU)
    staged = StagedKV(SPECS, range(len(SPECS)), LAYOUT.target_rows, torch.float32, CPU)
    for buffers, rows in ((pages.target, 5 * 4), (staged.stacks, LAYOUT.target_rows)):
        assert [stack.layers for stack in buffers] == [(0, 4), (2,)]
        assert [[tuple(plane.shape) for plane in stack.stacked] for stack in buffers] == [
            [(2, rows, 2, 8), (2, rows, 2, 6)],
            [(1, rows, 1, 24)],
        ]
    assert set(pages.layers) == {0, 2, 4}, "a recurrent layer has nothing in pages"
    held = sum(plane.nbytes for stack in pages.target for plane in stack.stacked)
    assert held == bytes_per_token(SPECS, torch.float32) * 5 * 4


def test_rows_in_fp8_take_a_byte_a_value_and_are_copied_as_bytes():
    """Staged and committed alike; layers of another dtype are a group of their own; the other sizes do not change."""
    specs = (*stored_as((HEADS, RECURRENT, LATENT), FP8), HEADS)
    pages = PagedKV(LAYOUT, 5, specs, len(specs), torch.float64, CPU)
    staged = StagedKV(specs, range(len(specs)), LAYOUT.target_rows, torch.float64, CPU)
    assert [stack.layers for stack in pages.target] == [(0,), (2,), (3,)]
    for made in (pages, staged):
        assert [made.layers[layer][0].dtype for layer in (0, 2, 3)] == [FP8, FP8, torch.float64]
    assert bytes_per_token(specs, torch.float64) == (28 + 24) + 8 * 28
    assert pages.scales.keys() == {0, 2} and all(torch.equal(s.k, torch.ones(len(s.k))) for s in pages.scales.values())
    plain = bytes_beside_pages(LAYOUT, (HEADS, RECURRENT, LATENT, HEADS), (), torch.float64)
    assert plain - bytes_beside_pages(LAYOUT, specs, (), torch.float64) == 7 * (28 + 24) * LAYOUT.target_rows
    # Every byte, NaN included.
    codes = torch.arange(256, dtype=torch.uint8).repeat(2)
    for plane in staged.layers[0]:
        plane.view(torch.uint8)[:4].view(-1).copy_(codes[: plane[:4].numel()])
    pages.commit(staged, torch.tensor([2, 0]), torch.tensor([7, 5]))
    for source, plane in zip(staged.layers[0], pages.layers[0], strict=True):
        source, plane = source.view(torch.uint8), plane.view(torch.uint8)
        assert torch.equal(plane[[7, 5]], source[[2, 0]]) and not plane[[0, 1, 2, 3, 4, 6]].any()


def test_recurrent_states_stand_by_slot_and_are_counted():
    made = RecurrentStates(SPECS, range(len(SPECS)), LAYOUT.num_slots, LAYOUT.target_rows, torch.float32, CPU)
    layers, slots, rows = (1, 3), LAYOUT.num_slots, LAYOUT.target_rows
    assert {key: tuple(value.shape) for key, value in made.states.items()} == {
        (layers, "state"): (2, slots, 4, 8, 3),
        (layers, "window"): (2, slots, 5),
    }
    assert {key: tuple(value.shape) for key, value in made.left.items()} == {(layers, "inputs"): (2, rows, 7)}
    states = sum(value.nbytes for value in (*made.states.values(), *made.left.values()))
    staged = [
        StagedKV(specs, range(len(specs)), rows, torch.float32, CPU)
        for specs, rows in ((SPECS, LAYOUT.target_rows), ((LATENT,), LAYOUT.draft_rows))
    ]
    buffers = sum(plane.nbytes for each in staged for stack in each.stacks for plane in stack.stacked)
    assert bytes_beside_pages(LAYOUT, SPECS, (LATENT,), torch.float32) == buffers + states


def test_what_no_prefix_cache_can_hold_is_refused_by_name():
    require_reentry(False, SPECS)
    require_reentry(True, (HEADS, LATENT))
    with pytest.raises(EspalierError, match="prefix_cache=True is not supported with layers that keep a recurrent st"):
        require_reentry(True, SPECS)


def test_auto_turns_the_prefix_cache_off(monkeypatch):
    """As no backend runs a recurrent layer yet, none is asked."""
    facts = replace(FACTS, layer_specs=(*FACTS.layer_specs[:-2], RECURRENT, FACTS.layer_specs[-1]))
    with pytest.raises(EspalierError, match="attention=sdpa does not support layers that keep a recurrent state"):
        resolved(facts)
    monkeypatch.setattr("espalier.startup.resolve.grouped_backend", lambda *_, **__: None)
    assert resolved(facts).prefix_cache is False and resolved().prefix_cache is True
    with pytest.raises(EspalierError, match="prefix_cache=True is not supported with layers"):
        resolved(facts, prefix_cache=True)


def test_a_recurrent_layer_has_no_backend_yet():
    with pytest.raises(EspalierError, match="reference does not support layers that keep a recurrent state"):
        grouped_backend("reference", "cpu", torch.float32, 16, SPECS, range(len(SPECS)))
