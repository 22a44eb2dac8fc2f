"""Tables of trees: what they say is read, written and refused by name; without one, trees are predicted."""

import json
import logging
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.config import EngineConfig, SpeculationConfig
from espalier.engine.acceptance import FIRST_CHILD_RATES, gains, scaled_first_child_rates
from espalier.errors import EspalierError
from espalier.layout import PLAIN_TREE, TreeShape, next_bucket
from espalier.models import DraftSpec
from espalier.startup import resolve
from espalier.startup import tree_policy as trees
from espalier.startup.tree_cost import ASSUMED_CONTEXT, ChipFigures, PassWeights, smaller_trees
from espalier.startup.tree_policy import (
    MAX_VERIFY_ROWS,
    PredictedCosts,
    choose_trees,
    read_trees,
    tree_sets,
    write_trees,
)
from tests.test_config import CPU, FACTS, HEAD

H100 = ChipFigures("an H100", 3.0e12, 6.9e14)
# Llama-3.1-8B with an EAGLE-3 head.
BIG = PredictedCosts(PassWeights(7_504_658_432, 391_118_848, num_layers=32, num_draft_layers=1, kv_values=65536), H100)
WIDE, NARROW = TreeShape(5, 8, 64), TreeShape(3, 2, 8)


def resolved(by_batch, algorithm="auto", facts=FACTS, **tree):
    speculation = SpeculationConfig(algorithm=algorithm, by_batch=by_batch, **tree)
    config = EngineConfig(speculation=speculation)
    spec = DraftSpec("none") if algorithm == "none" else HEAD
    return resolve.resolve(config, "target", "draft", spec, CPU, facts)


def test_by_default_wide_trees_are_halved_where_a_batch_would_have_too_many_nodes():
    """At most 4096 nodes a verify pass; a table of the user's, the empty one too, is left as it is."""
    deep = TreeShape(15, 8, 256)
    halved = {17: TreeShape(15, 8, 128), 33: TreeShape(15, 8, 64)}
    assert choose_trees("auto", deep, None, max_batch=64) == halved
    assert choose_trees("auto", deep, None, max_batch=16) == choose_trees("auto", WIDE, None, max_batch=64) == {}
    assert choose_trees({}, deep, None, max_batch=64) == {}
    assert list(choose_trees("auto", TreeShape(1, 1, 2), None, max_batch=10**6).values()) == [TreeShape(1, 1, 1)]
    # A predicted tree of a few nodes comes first.
    assert 17 not in choose_trees("auto", TreeShape(5, 8, 256), BIG, max_batch=64)
    for least, shape in {1: deep, **halved}.items():
        assert least * shape.num_draft_tokens <= trees.MAX_VERIFY_ROWS


@pytest.mark.parametrize("nodes", [2, 16, 64])
@pytest.mark.parametrize("max_batch", [1, 100, 384, 512, 5000])
@pytest.mark.parametrize("predicted", [{}, {1: NARROW, 24: WIDE}, {1: PLAIN_TREE, 24: NARROW}, {7: WIDE}], ids=str)
def test_no_tree_of_any_batch_has_too_many_rows(nodes, max_batch, predicted):
    """Predicted trees too: those of mixtures grow with the batch.  Trees that fit stay as they are."""
    configured = TreeShape(5, 8, nodes)
    limited = trees._limit_trees(predicted, configured, max_batch)
    for batch in range(1, max_batch + 1):
        shape, whole = ({1: configured, **table} for table in (limited, predicted))
        shape, whole = (table[max(least for least in table if least <= batch)] for table in (shape, whole))
        assert shape == whole or shape == replace(whole, num_draft_tokens=shape.num_draft_tokens)
        assert shape.num_draft_tokens == 1 or batch * shape.num_draft_tokens <= MAX_VERIFY_ROWS
        assert shape == whole or batch * 2 * shape.num_draft_tokens > MAX_VERIFY_ROWS


def test_a_batch_of_more_rows_than_trees_may_have_still_has_trees():
    for batch, shapes in tree_sets(WIDE, BIG, 5000):
        assert all(shape.num_draft_tokens == 1 or batch * shape.num_draft_tokens <= MAX_VERIFY_ROWS for shape in shapes)


def test_a_table_comes_back_as_it_was_written(tmp_path):
    table = {1: WIDE, 8: TreeShape(5, 4, 16), 32: NARROW, 64: PLAIN_TREE}
    write_trees(tmp_path / "table.json", table)
    assert read_trees(tmp_path / "table.json") == table
    assert list(json.loads((tmp_path / "table.json").read_text())) == ["1", "8", "32", "64"]
    with pytest.raises(EspalierError, match="cannot be written"):
        write_trees(tmp_path / "no" / "table.json", table)


def test_a_table_becomes_the_layouts_trees(tmp_path):
    write_trees(tmp_path / "table.json", {2: NARROW, 5: PLAIN_TREE})
    for table in (tmp_path / "table.json", {2: NARROW.sizes, "5": {"steps": 0}}, {2: NARROW, 5: PLAIN_TREE}):
        config = resolved(table)
        assert config.layout.trees == ((2, NARROW), (5, PLAIN_TREE))
        assert '{"2": {"steps": 3, "topk": 2, "num_draft_tokens": 8}, "5":' in config.as_text()
    assert resolved({}).layout.trees == ()


REFUSED = [
    ({0: {"steps": 0}}, "0 is not a number of requests"),
    ({"08": {"steps": 0}}, "'08' is not a number of requests"),
    ({"x": {"steps": 0}}, "'x' is not a number of requests"),
    ({True: {"steps": 0}}, "True is not a number of requests"),
    ({8: PLAIN_TREE, 4: PLAIN_TREE}, "4 comes after 8"),
    ({8: PLAIN_TREE, "8": PLAIN_TREE}, "8 comes after 8"),
    ({8: 3}, "from 8 requests on: 3 is not a tree"),
    ({8: {"steps": 0, "depth": 1}}, "unknown 'depth'; a tree has steps, topk, num_draft_tokens"),
    ({8: {"steps": 2, "topk": 1}}, "num_draft_tokens is missing"),
    ({8: {"steps": "2", "topk": 1, "num_draft_tokens": 2}}, "steps='2' is not supported"),
    ({8: {"steps": 2, "topk": 1, "num_draft_tokens": 9}}, "num_draft_tokens=9 is not supported; use 1 to 3"),
    ({8: {"steps": 6, "topk": 1, "num_draft_tokens": 2}}, "steps=6 .* above the configured steps=5"),
    ({8: {"steps": 2, "topk": 5, "num_draft_tokens": 2}}, "topk=5 .* above the configured topk=4"),
    ({8: {"steps": 5, "topk": 4, "num_draft_tokens": 17}}, "num_draft_tokens=17 .* above the configured"),
]


@pytest.mark.parametrize(("table", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_a_bad_table_is_refused_in_one_line(table, said):
    with pytest.raises(EspalierError, match=said) as refused:
        resolved(table)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "is not a file"),
        ("{", "cannot be read"),
        ("[1]", "holds no JSON object"),
        ('{"8": {"steps": 0}, "8": {"steps": 0}}', "twice"),
        ('{"8": {"steps": 0}, "4": {"steps": 0}}', "4 comes after 8"),
    ],
)
def test_a_bad_file_is_named(tmp_path, text, said):
    path = tmp_path / "table.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(EspalierError, match=said) as refused:
        resolved(str(path))
    assert str(path) in str(refused.value)


def test_plain_decoding_takes_no_trees():
    assert resolved("auto", algorithm="none").layout.trees == ()
    with pytest.raises(EspalierError, match=r"steps=3 .* above the configured steps=0"):
        resolved({8: NARROW}, algorithm="none")


def test_trees_get_smaller_with_the_batch_and_the_log_says_why(caplog):
    caplog.set_level(logging.INFO)
    found = choose_trees("auto", WIDE, BIG, max_batch=64)
    assert list(found.values()) == [TreeShape(5, 4, 16), TreeShape(3, 2, 8), TreeShape(3, 1, 4)]
    assert "predicted from 3.0 TB/s and 690 TFLOP/s, as measured on an H100, and from the accept lengths" in caplog.text
    assert choose_trees({}, WIDE, BIG) == choose_trees("auto", PLAIN_TREE, BIG) == {}
    caplog.clear()
    assert choose_trees("auto", WIDE, None) == {}
    assert "at every batch (trees of smaller batches are not predicted for this device" in caplog.text
    facts = replace(FACTS, chip=H100, pass_weights=BIG.weights)
    config = EngineConfig(speculation=SpeculationConfig(steps=5, topk=8, num_draft_tokens=64), max_batch=64)
    assert resolve.resolve(config, "target", "draft", HEAD, CPU, facts).layout.trees == tuple(found.items())


@pytest.mark.parametrize(
    ("tree", "max_batch", "level"),
    [
        ({"topk": 4}, 32, "WARNING"),
        ({}, 32, "INFO"),
        ({"topk": 4}, 1, "WARNING"),
    ],
)
def test_a_named_tree_is_not_dropped_in_silence(tree, max_batch, level, caplog):
    caplog.set_level(logging.INFO)
    facts = replace(FACTS, chip=H100, pass_weights=BIG.weights)
    config = EngineConfig(speculation=SpeculationConfig(**tree), max_batch=max_batch)
    found = resolve.resolve(config, "target", "draft", HEAD, CPU, facts)
    said = [r for r in caplog.records if "trees by batch" in r.message]
    assert [r.levelname for r in said] == [level] and "by_batch={} keeps the tree" in said[0].message
    assert bool(found.layout.trees) == (max_batch > 1)


@settings(max_examples=settings.default.max_examples // 2)
@given(
    configured=st.sampled_from(
        [TreeShape(5, 4, 16), WIDE, TreeShape(5, 8, 256), TreeShape(3, 1, 4), TreeShape(1, 1, 2)]
    ),
    block_rows=st.sampled_from([0, 16]),
    num_experts=st.sampled_from([1, 64]),
    size=st.floats(5e8, 7e10),
    draft=st.floats(0.02, 0.3),
    max_batch=st.integers(1, 140),
    has_sources=st.booleans(),
)
def test_sets_of_trees_fit_and_lose_little_whatever_the_models(
    configured, block_rows, num_experts, size, draft, max_batch, has_sources
):
    """Against all candidates, at any acceptance, also where one candidate is 8% faster than predicted."""
    dense, expert = int(size / num_experts), int(size / num_experts / 4) * (num_experts > 1)
    weights = PassWeights(dense, int(dense * draft), expert, num_experts, 4, 32, 1, 65536, block_rows=block_rows)
    costs = PredictedCosts(weights, H100)
    for least, chosen in tree_sets(configured, costs, max_batch, has_sources):
        batch = next_bucket(least)
        assert sum(not tree.drafts for tree in chosen) == has_sources and len(set(chosen)) == len(chosen)
        assert all(min(batch, max_batch) * tree.num_draft_tokens <= MAX_VERIFY_ROWS for tree in chosen)
        for tree in chosen:
            configured.require_fits(tree)
        chosen = [tree for tree in chosen if tree.drafts]
        candidates = {*chosen, *smaller_trees(configured, weights), configured}
        candidates = [tree for tree in candidates if min(batch, max_batch) * tree.num_draft_tokens <= MAX_VERIFY_ROWS]
        assert PLAIN_TREE in chosen and len(chosen) >= min(4, len(candidates))
        for level in (0.05, 0.25, 0.45, 0.65, 0.76, 0.85, 0.92):
            first_child = scaled_first_child_rates(level, configured.steps)
            rates = {
                tree: (1 + gains(tree, first_child)[-1]) / costs.seconds(tree, batch, ASSUMED_CONTEXT)
                for tree in candidates
            }
            for faster in {*candidates} - {PLAIN_TREE}:
                found = rates | {faster: 1.08 * rates[faster]}
                assert max(found[tree] for tree in chosen) >= 0.96 * max(found.values()), (batch, level, faster)
            if level == FIRST_CHILD_RATES[0]:
                assert rates[chosen[0]] == max(rates[tree] for tree in chosen), "the fastest by prediction is first"
