"""Planted faults: each replaces one engine function by a wrong one that never raises.  Property tests must catch it.

A fault has a name, and the numbers of the public bug reports that it reproduces (docs/seeds.md).  `plant` is for tests,
and `python -m lab fault` for a look at what a fault does.  The replaced functions contain no switch.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from espalier.errors import EspalierError
from espalier.kernels.attention.ancestor_bits import self_only_bits
from espalier.kernels.ops.experts import MAX_SHARED_ROWS
from espalier.kernels.ops.state import load_carried_field
from lab.faults.base import Fault
from lab.faults.rank_faults import RANK_FAULTS
from lab.faults.selection_faults import SELECTION_FAULTS
from lab.faults.source_faults import SOURCE_FAULTS
from lab.faults.state_faults import STATE_FAULTS


def _sibling_committed(original):
    """Siblings have adjacent rows in the tree, the more likely one first."""

    def commit(runner, slots, path, count_tokens, snapshots=None):
        last = runner.layout.num_draft_tokens - 1
        siblings = torch.where(path.rows > 0, (path.rows + 1).clamp(max=last), 0)
        original(runner, slots, path._replace(rows=siblings), count_tokens, snapshots)

    return commit


def _extend_short(original):
    return lambda slots, length, width: original(slots, length - 1, width)


def _wrong_ancestor(original):
    def select_beams(tokens, scores, ancestor_bits, path, first, num_ancestor_words):
        beams = original(tokens, scores, ancestor_bits, path, first, num_ancestor_words)
        if ancestor_bits is None:
            return beams
        own_bits = self_only_bits(first, ancestor_bits.shape[1], num_ancestor_words, ancestor_bits.device)
        return beams._replace(ancestor_bits=ancestor_bits | own_bits)

    return select_beams


def _rows_without_topk(original):
    """Reads beam b of level l from row l + b; its row is l · topk + b."""

    def rows_of(staging, layer, batch, queries, width, at):
        staged = original(staging, layer, batch, queries, width, at)
        if queries == width:
            return staged
        rows = torch.arange(at + queries, device=staged[0].device)
        wrong_rows = torch.div(rows, queries, rounding_mode="floor") + rows % queries
        return tuple(value[:, wrong_rows] for value in staged)

    return rows_of


def _table_column_off(original):
    def page_table_updates(table, appended_pages):
        last = table.layout.table_width - 1
        return original(table, tuple((slot, min(column + 1, last), page) for slot, column, page in appended_pages))

    return page_table_updates


def _stale_hidden(original):
    def carry(slots, name, values, length):
        # A split prefill pass has a slot for each request, but a prefix length for each piece.
        if len(slots.prefix_len) != len(slots.index):
            return original(slots, name, values, length)
        unchanged = slots.prefix_len[:, None, None] % 2 == 0
        return original(slots, name, torch.where(unchanged, load_carried_field(slots, name), values), length)

    return carry


def _stale_feed(original):
    stale = _stale_hidden(original)
    return lambda slots, name, values, length: (stale if name.startswith("feed") else original)(
        slots, name, values, length
    )


def _forced_form(form):
    return lambda original: lambda declared: original(form)


def _hidden_before_norm(original):
    return lambda x, normed: replace(original(x, normed), hidden=x)


def _packed_stride(original):
    """Reads a request's features as if requests were packed by length; each request takes `width` rows."""

    def extend(drafter, slots, captured, length, last=None):
        batch, width = captured.shape[:2]
        first = length.cumsum(0) - length
        rows = first[:, None] + torch.arange(width, device=length.device)
        packed = captured.flatten(0, 1)[rows.clamp(max=max(batch * width - 1, 0))]
        original(drafter, slots, packed, length, last)

    return extend


def _per_branch_reserve(original):
    def reserve(layout, num_known, rounds, end):
        branch = layout.pages_for(layout.page_size - 1 + layout.steps) * layout.page_size
        tokens = 2 * max(branch * layout.topk, layout.num_draft_tokens)
        return min(original(layout, num_known, rounds, end) + layout.pages_for(tokens), layout.table_width)

    return reserve


def _parent_noise(original):
    return lambda tree: tree.depths.gather(1, tree.parents)


def _freed_twice(original):
    def release(pool, pages):
        pages = list(pages)
        original(pool, pages)
        original(pool, [page for page in pages if pool.reference_count(page)][:1])

    return release


def _rope_left_out(original):
    def store(*arguments):
        stored = original(*arguments)
        rotation, _, rows, plane, _ = arguments[4]
        plane[..., plane.shape[2] - rotation.cos.shape[1] :].index_fill_(0, rows, 0)
        return stored

    return store


def _padding_routed(original):
    return lambda runner, tokens, exists: tokens


def _shared_twice(original):
    """Applies only where the shared expert runs in the launches of the routed experts."""

    def mixed(mlp, x, of_experts, logits, live):
        parts = original(mlp, x, of_experts, logits, live)
        if mlp.shared_expert_tiles is not None and len(x) <= MAX_SHARED_ROWS:
            parts[mlp.routing.top_k :] *= 2
        return parts

    return mixed


def _mask_row_kept(original):
    """Commits the first mask row of each block to its position."""

    def block(drafter, slots):
        hidden = original(drafter, slots)
        first_mask = drafter.cache.staging.row_indices[1 : slots.batch * drafter.block_width : drafter.block_width]
        rows = drafter.cache.pages.rows(slots.page_table, slots.prefix_len[:, None] + 1)
        drafter.cache.commit(first_mask, rows.flatten())
        return hidden

    return block


def _wrong_layers(original):
    return lambda draft, features: original(draft, features.roll(draft.spec.hidden_size, -1))


def _positions_one_late(original):
    def block_rows(*args):
        rows = original(*args)
        return rows._replace(positions=rows.positions + 1)

    return block_rows


def _field_of_row_before(field):
    """Each row of a depth takes this field from the row before it.  Rows without the field stay as they are."""

    def make_wrong(original):
        def with_edges(roots, steps, topk, next_depth):
            def wrong_depth(depth, rows, out):
                value = getattr(rows, field)
                wrong_rows = rows if value is None else rows._replace(**{field: value.roll(1, 1)})
                return next_depth(depth, wrong_rows, out)

            return original(roots, steps, topk, wrong_depth)

        return with_edges

    return make_wrong


def _scales_of_layer_before(original):
    def kv_scales(target):
        stored = original(target)
        layers = list(stored)
        return {layer: stored[layers[i - 1]] for i, layer in enumerate(layers)}

    return kv_scales


def _rounded_twice(original):
    return lambda values, scales: original(original(values, scales), scales)


FAULTS = {
    fault.name: fault
    for fault in (
        Fault(
            "sibling-committed",
            "the K/V rows of the accepted node's sibling are committed in place of its own",
            "espalier.speculate.round:commit",
            _sibling_committed,
            ("26866",),
        ),
        Fault(
            "extend-one-short",
            "the draft's extend keeps one row too few",
            "espalier.speculate.drafters.autoregressive:extend_rows",
            _extend_short,
        ),
        Fault(
            "wrong-ancestor",
            "a selected beam attends to the rows of the beam that had its index at the level above",
            "espalier.speculate.drafters.autoregressive:select_beams",
            _wrong_ancestor,
        ),
        Fault(
            "rows-without-topk",
            "the row index of a beam lacks the factor topk, so branches read each other's rows",
            "espalier.cache.kv:StagedKV.staged_planes",
            _rows_without_topk,
            ("27460", "27338", "27428"),
        ),
        Fault(
            "table-column-off",
            "a new page of a request is written one column too far right in its page table",
            "espalier.slots:SlotTable.page_table_updates",
            _table_column_off,
            ("27360",),
        ),
        Fault(
            "stale-hidden",
            "the slot keeps the hidden state of an earlier launch",
            "espalier.speculate.drafters.autoregressive:store_carried_field",
            _stale_hidden,
            ("22832",),
        ),
        Fault(
            "stale-feed",
            "the slot keeps what fed the second and third MTP layer in an earlier launch",
            "espalier.speculate.drafters.autoregressive:store_carried_field",
            _stale_feed,
        ),
        Fault(
            "chain-reads-target",
            "MTP layers that are trained as a chain all read the target's hidden states",
            "espalier.speculate.drafters.autoregressive:feeds_class",
            _forced_form("target"),
        ),
        Fault(
            "target-reads-chain",
            "MTP layers that are trained on the target's hidden states read those of the layer before",
            "espalier.speculate.drafters.autoregressive:feeds_class",
            _forced_form("chain"),
        ),
        Fault(
            "hidden-before-norm",
            "an MTP layer hands on its hidden state from before its last norm",
            "espalier.models.mtp:output_from_normed",
            _hidden_before_norm,
        ),
        Fault(
            "packed-stride",
            "the draft's extend reads its features as packed by length; they have a uniform stride",
            "espalier.speculate.drafters.autoregressive:AutoregressiveDrafter.extend",
            _packed_stride,
            ("21987", "19807"),
        ),
        Fault(
            "per-branch-reserve",
            "a round reserves pages for every branch of the tree, twice",
            "espalier.layout:RoundLayout.pages_needed",
            _per_branch_reserve,
            ("26972",),
        ),
        Fault(
            "parent-noise",
            "a node's token is drawn with the noise of its parent's position",
            "espalier.speculate.sampler:noise_offsets",
            _parent_noise,
        ),
        Fault(
            "page-freed-twice",
            "a page that is still in use is released a second time",
            "espalier.cache.pages:PagePool.release",
            _freed_twice,
        ),
        Fault(
            "rope-left-out",
            "a latent row is stored without its rotated part",
            "espalier.cache.layer_spec:write_latents",
            _rope_left_out,
        ),
        Fault(
            "padding-routed",
            "rows that pad a request are routed to experts",
            "espalier.speculate.round:void_padding",
            _padding_routed,
        ),
        Fault(
            "shared-expert-twice",
            "the shared expert is added twice where it runs beside the routed ones",
            "espalier.models.layers.mlp:MixtureMLP._sum_of_experts",
            _shared_twice,
        ),
        Fault(
            "mask-row-kept",
            "a mask row of a block draft is committed",
            "espalier.speculate.drafters.one_pass:OnePassDrafter._run_block",
            _mask_row_kept,
        ),
        Fault(
            "features-of-wrong-layer",
            "a block draft reads the target's layers in another order",
            "espalier.models.block:BlockDraft.fuse",
            _wrong_layers,
        ),
        Fault(
            "anchor-late",
            "the rows of a block are one position too late",
            "espalier.speculate.drafters.one_pass:block_rows",
            _positions_one_late,
        ),
        Fault(
            "edge-of-wrong-parent",
            "the edges of a block draft are those of another token of the depth before",
            "espalier.speculate.drafters.one_pass:edge_candidates",
            _field_of_row_before("tokens"),
        ),
        Fault(
            "state-of-wrong-path",
            "a path's recurrent edges have the state of another path",
            "espalier.speculate.drafters.one_pass:edge_candidates",
            _field_of_row_before("parents"),
        ),
        Fault(
            "neighbours-scale",
            "K and V in FP8 have the scales of the layer before",
            "espalier.startup.build:kv_scales",
            _scales_of_layer_before,
        ),
        Fault(
            "v-scaled-twice",
            "V in FP8 is multiplied by its scale twice",
            "espalier.attention.sdpa:times_v_scale",
            _rounded_twice,
        ),
        *STATE_FAULTS,
        *SELECTION_FAULTS,
        *SOURCE_FAULTS,
    )
} | RANK_FAULTS


def find_fault(name: str) -> Fault:
    """The fault with this name or report number.  Raises EspalierError, which lists all of them."""
    for fault in FAULTS.values():
        if name == fault.name or name in fault.reports:
            return fault
    reports = sorted(number for fault in FAULTS.values() for number in fault.reports)
    raise EspalierError(
        f"fault {name!r} is unknown; use a name ({', '.join(FAULTS)}) or a report number ({', '.join(reports)})"
    )


@contextmanager
def plant(name: str) -> Iterator[Fault]:
    """Plant a fault for the duration of the context.  Raises EspalierError for an unknown name."""
    fault = find_fault(name)
    owner, attribute = _resolve(fault.target)
    original = vars(owner)[attribute]
    setattr(owner, attribute, fault.make_wrong(original))
    try:
        yield fault
    finally:
        setattr(owner, attribute, original)


def _resolve(target: str) -> tuple[Any, str]:
    module, _, path = target.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, attribute = path.split(".")
    for name in parents:
        owner = getattr(owner, name)
    return owner, attribute
