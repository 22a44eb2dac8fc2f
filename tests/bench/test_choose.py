"""The fastest tree at each batch: measured end to end over a tiny model, and written as an engine reads it."""

import json

import pytest

from espalier import LLM, SpeculationConfig
from espalier.bench import choose
from espalier.bench.choose import TreeTime, by_batch_table, fastest_trees, trees_to_measure
from espalier.cli.main import parse
from espalier.errors import EspalierError
from espalier.layout import PLAIN_TREE, TARGET_ONLY, TreeShape
from espalier.startup import tree_policy as trees
from tests.cli.test_cli import instead, run, tiny, tiny_heldout  # noqa: F401  (fixtures)
from tests.test_llm import paths  # noqa: F401  (a fixture)

WIDE, MIDDLE, NARROW = choose.CANDIDATE_TREES


def test_the_fastest_of_each_batch_becomes_the_table():
    timed = [
        *(TreeTime(batch, WIDE, ms, 4.0) for batch, ms in ((1, 4.0), (2, 8.0), (4, 32.0), (8, 64.0))),
        *(TreeTime(batch, NARROW, ms, 2.0) for batch, ms in ((1, 3.0), (2, 4.0), (4, 8.0), (8, 64.0))),
        *(TreeTime(batch, PLAIN_TREE, ms, 1.0) for batch, ms in ((1, 2.0), (2, 2.0), (4, 4.0), (8, 8.0))),
        *(TreeTime(batch, TARGET_ONLY, 0.1, 1.0) for batch in (1, 2, 4, 8)),
    ]
    assert TreeTime(2, NARROW, 4.0, 2.0).tokens_per_second == 1000
    assert {batch: one.tree for batch, one in fastest_trees(timed).items()} == {
        1: WIDE,
        2: WIDE,
        4: NARROW,
        8: PLAIN_TREE,
    }
    assert by_batch_table(timed) == {1: WIDE, 4: NARROW, 8: PLAIN_TREE}


def test_candidates_are_those_that_the_buffers_hold():
    assert trees_to_measure(WIDE, []) == [WIDE, MIDDLE, NARROW, PLAIN_TREE]
    assert trees_to_measure(TreeShape(5, 4, 12), []) == [TreeShape(5, 4, 12), NARROW, PLAIN_TREE]
    assert trees_to_measure(WIDE, [NARROW, PLAIN_TREE, NARROW]) == [NARROW, PLAIN_TREE]
    with pytest.raises(EspalierError, match="above the configured"):
        trees_to_measure(MIDDLE, [WIDE])


def test_a_block_drafts_candidates_keep_its_depth():
    """Depth is free for it, and nodes are not."""
    deep = TreeShape(15, 8, 256)
    trees = [TreeShape(15, 8, nodes) for nodes in (256, 64, 32, 16, 8)]
    assert trees_to_measure(deep, [], is_block=True) == [*trees, PLAIN_TREE]
    assert trees_to_measure(TreeShape(7, 4, 16), [], is_block=True) == [
        TreeShape(7, 4, 16),
        TreeShape(7, 4, 8),
        PLAIN_TREE,
    ]
    assert trees_to_measure(deep, [WIDE], is_block=True) == [WIDE]


def test_every_bucket_is_measured_with_every_candidate(tiny, tiny_heldout, paths, capsys, tmp_path):  # noqa: F811
    out, figures = tmp_path / "table.json", tmp_path / "figures.json"
    flags = ["--tokens", "6", "--context", "8", "--repeats", "1", "--max-batch", "3", "--by-batch", "{}"]
    assert run("bench", "choose", *flags, "--out", out, "--json", figures, *tiny) == 0
    said = capsys.readouterr().out
    assert said.count("*") == 3 and "plain decoding" in said and "accept lengths measured" in said
    found = json.loads(figures.read_text())
    # A tree, plain decoding that keeps the draft ready, and plain decoding without a draft.
    assert [(cell["batch"], cell["num_draft_tokens"]) for cell in found["cells"]] == [
        (batch, nodes) for nodes in (8, 1, 1) for batch in (1, 2, 3)
    ]
    plain = [cell for cell in found["cells"] if cell["steps"] == 0]
    assert all(cell["accept_length"] == 1.0 and cell["round_ms"] > 0 for cell in plain)
    assert {str(least): shape for least, shape in found["by_batch"].items()} == json.loads(out.read_text())
    # An engine runs by it.
    target, draft = paths
    speculation = SpeculationConfig(steps=3, topk=2, num_draft_tokens=8, by_batch=out)
    with LLM(target, draft=draft, dtype="float64", max_context=64, speculation=speculation) as llm:
        assert dict(llm.engine.layout.trees) == trees.read_trees(out)


def test_only_the_named_batches_are_measured(tiny, tiny_heldout, capsys, tmp_path):  # noqa: F811
    out, figures = tmp_path / "table.json", tmp_path / "figures.json"
    flags = [
        "--tokens",
        "12",
        "--context",
        "8",
        "--repeats",
        "1",
        "--candidates",
        "0,1,1",
        "--by-batch",
        "{}",
    ]
    assert run("bench", "choose", *flags, "--batch", "2,1", "--out", out, "--json", figures, *tiny) == 0
    assert [cell["batch"] for cell in json.loads(figures.read_text())["cells"]] == [1, 2]
    assert trees.read_trees(out)
    assert run("bench", "choose", *flags, "--batch", "16,13", *tiny) == 2
    assert "--batch=13 is not measured, as rounds are padded; use some of" in capsys.readouterr().err


def test_a_batch_runs_whole_however_long_its_prompts_take_to_enter(tiny, tiny_heldout, capsys):  # noqa: F811
    flags = ["--tokens", "4", "--context", "80", "--chunk-size", "16", "--repeats", "1", "--max-batch", "2"]
    assert run("bench", "choose", *flags, "--candidates", "3,2,8", *tiny) == 0
    assert capsys.readouterr().out.count("*") == 2


def test_prompts_of_a_dataset_are_taken_in_turn(tiny, tiny_heldout, tmp_path, monkeypatch, capsys):  # noqa: F811
    prompts, driven = [[1, 2], [3, 4, 5], [6]], []
    lines = [json.dumps({"token_ids": tokens}) for tokens in (*prompts, list(range(1, 10)))]
    (tmp_path / "data").write_text("\n".join(lines))
    drive = choose.drive
    monkeypatch.setattr(
        choose, "drive", lambda engine, given, params: driven.append(given) or drive(engine, given, params)
    )
    flags = ["--tokens", "4", "--context", "3", "--repeats", "2", "--batch", "1,2", "--candidates", "0,1,1"]
    assert run("bench", "choose", *flags, "--by-batch", "{}", "--dataset", str(tmp_path / "data"), *tiny) == 0
    a, b, c = prompts
    assert driven == [[a], [b], [c], [a, b], [c, a], [b, c]]
    assert "1 of 4 prompts are left out: above 3 tokens" in capsys.readouterr().out
    (tmp_path / "data").write_text(lines[-1])
    assert run("bench", "choose", *flags, "--dataset", str(tmp_path / "data"), *tiny) == 2
    assert "no prompt of up to 3 tokens; raise --context" in capsys.readouterr().err


BAD = [
    (["--candidates", "5,4"], "'5,4' is no tree"),
    (["--candidates", "2,1,9"], "'2,1,9' is no tree: num_draft_tokens=9"),
    (["--candidates", "4,2,8"], "a batch's tree with steps=4 is above the configured steps=3"),
    (["--context", "8,9"], "'8,9' is not supported; use a whole number"),
    (
        ["--num-pages", "12", "--context", "60", "--max-batch", "3", "--tokens", "8", "--candidates", "2,1,3"],
        "no round held 3 requests of 60",
    ),
    (["--accept-length", "8"], "run `python -m lab choose`"),
]


@pytest.mark.parametrize(("flags", "said"), BAD, ids=[said for _, said in BAD])
def test_bad_flags_are_one_line_and_status_2(tiny, tiny_heldout, flags, said, capsys):  # noqa: F811
    sizes = ["--context", "8", "--tokens", "12", "--repeats", "1"]
    assert run("bench", "choose", *instead(sizes, *flags), *tiny) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_a_table_is_a_flag():
    asked = parse(["generate", "x", "--by-batch", '{"8": {"steps": 0}}'])
    assert vars(asked)["SpeculationConfig.by_batch"] == {"8": {"steps": 0}}
    assert vars(parse(["generate", "x", "--by-batch", "t.json"]))["SpeculationConfig.by_batch"] == "t.json"
