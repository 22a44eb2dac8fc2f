"""Compiles the kernels that read the slot table for Hopper, and prints, as JSON, the names of those that compiled.

A program of its own: where kernels are interpreted, nothing compiles.  Compiling needs no GPU.  The interpreter accepts
code that the compiler refuses.
"""

import json
from dataclasses import replace

import torch
from triton.runtime import driver

from espalier.kernels.ops.drafts import Candidates
from espalier.kernels.ops.state import AcceptedNodes, advance, gather_slots, read_chain
from espalier.kernels.runtime.precompile import precompile
from espalier.kernels.sampling.pick import sample_triton
from espalier.kernels.tree.draft_topk import draft_topk_triton
from espalier.kernels.tree.edge_factors import edge_factors_triton
from espalier.kernels.tree.edge_topk import edge_topk_triton
from espalier.kernels.tree.edges import DepthRows, FactorProjection, LowRankEdges
from tests.kernels.asked import Driver
from tests.kernels.compiled import lowered_only
from tests.kernels.sampled import kernel_rows, random_above, table_of

VOCAB, DRAFT_VOCAB, QUERIES = 4096, 2048, 3


def launch_all() -> None:
    """With and without drafted tokens, a mask, and a draft vocabulary of its own."""
    table = table_of(({}, {}), VOCAB, torch.device("cpu"))
    slots = gather_slots.triton(table, torch.tensor([1, 2]))
    rows, positions = kernel_rows(slots), torch.zeros(2, QUERIES, dtype=torch.int64)
    above = random_above(2, QUERIES, 5, VOCAB, torch.device("cpu"))
    hanging, mask = (above.tokens, above.ancestor_bits), torch.zeros(2, QUERIES, VOCAB // 32, dtype=torch.int32)
    logits = torch.zeros(2, QUERIES, VOCAB, dtype=torch.bfloat16)
    sample_triton(logits, rows, slots.root, positions)
    sample_triton(logits, rows, slots.root, positions, hanging, 1, mask)
    scores, d2t = torch.zeros(2, QUERIES), torch.arange(DRAFT_VOCAB)
    draft_topk_triton(logits, None, rows, slots.root, 1, scores, 4)
    draft_topk_triton(logits[..., :DRAFT_VOCAB], d2t, rows, slots.root, 1, scores, 4, hanging)
    edges = LowRankEdges(logits, torch.zeros(VOCAB, 64).bfloat16(), torch.zeros(VOCAB, 64).bfloat16())
    given, out = (
        DepthRows(slots.root[:, None].expand(2, 4), torch.zeros(2, 4)),
        Candidates.empty(slots.root, QUERIES, 4),
    )
    edge_topk_triton(edges, 1, given, None, None, rows, slots.root, out.at_depth(1, 4))
    states = torch.zeros(2, 4, 64).bfloat16()
    for parts, inputs in ((1, 1), (3, 2)):
        weight, hidden_part = torch.zeros(parts * 64, inputs * 64), torch.zeros(2, QUERIES, parts * 64)
        projection = FactorProjection(hidden_part.bfloat16(), weight.bfloat16(), is_recurrent=parts == 3)
        by_path = given._replace(parents=given.tokens, states=states) if parts == 3 else given
        reads_more = replace(edges, projection=projection)
        factors = edge_factors_triton(reads_more, 1, by_path)
        edge_topk_triton(reads_more, 1, by_path, factors, None, rows, slots.root, out.at_depth(1, 4))
    read_chain.triton(slots, 0, slots.root, 4)
    advance.triton(slots, slots.root, positions, False)
    advance.triton(slots, slots.root, positions, True, AcceptedNodes(positions, 4))


if __name__ == "__main__":
    stand_in = Driver()
    driver.set_active(stand_in)
    with lowered_only(), precompile():
        launch_all()
    print(json.dumps(sorted({name for name, _ in stand_in.loaded})))
