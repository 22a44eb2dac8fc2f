"""What proposes tokens beside the draft, as asked for and by default; what cannot be is refused by name."""

import pytest
import torch

from espalier.config import SpeculationConfig
from espalier.errors import EspalierError
from espalier.layout import PLAIN_TREE, TreeShape
from espalier.startup.sources import can_share_rows, choose_sources, source_sizes
from tests.harness import Setup

TREE = TreeShape(4, 2, 9)


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("asked", "tree", "device", "sources", "sizes"),
    [
        ({}, TREE, "cpu", ("prediction",), (0, 2)),
        ({}, TREE, "cuda", (), (0, 0)),
        ({}, PLAIN_TREE, "cpu", (), (0, 0)),
        ({"sources": "none"}, TREE, "cpu", (), (0, 0)),
        ({"sources": "index, text"}, TREE, "cuda", ("text", "index"), (2, 2)),
        ({"sources": "text"}, TREE, "cpu", ("text",), (0, 2)),
        ({"sources": "text,index"}, TREE, "cpu", ("text", "index"), (0, 4)),
    ],
)
def test_by_default_predictions_on_a_cpu(asked, tree, device, sources, sizes):
    speculation = SpeculationConfig(**asked)
    chosen = choose_sources(speculation, "eagle3", tree, torch.device(device))
    assert {*chosen} == {*sources}
    # A CPU's host knows all tokens before a round, and searches them itself.
    got = source_sizes(chosen, searches_on_host=device == "cpu")
    assert (got["num_text_paths"], got["num_sent_paths"]) == sizes


@pytest.mark.parametrize(
    ("sources", "algorithm", "tree", "says"),
    [
        ("text,psychic", "eagle3", TREE, r"^sources='psychic' is not supported; use text, "),
        ("none,text", "eagle3", TREE, r"^sources='none' is not supported; use text, .*, or none alone$"),
        ("text", "eagle3", PLAIN_TREE, "^sources='text' needs a tree"),
        ("text", "ngram", TREE, "^sources='text' is what algorithm='ngram' drafts with; leave it out"),
    ],
)
def test_what_cannot_be_is_refused(sources, algorithm, tree, says):
    with pytest.raises(EspalierError, match=says):
        choose_sources(SpeculationConfig(sources=sources), algorithm, tree, torch.device("cpu"))


def test_rows_are_not_shared_where_all_must_run():
    plain = Setup().models()[0].layer_specs
    assert can_share_rows(plain, "native", CPU) and not can_share_rows(plain, "transformers", CPU)
    assert not can_share_rows(Setup(keeps="hybrid").models()[0].layer_specs, "native", CPU)
