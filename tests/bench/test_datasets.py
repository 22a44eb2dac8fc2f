"""`bench load --dataset`: what is read of each format, what is refused before a model is loaded, and the report."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from espalier.bench.datasets import read_conversations
from espalier.bench.load import AnsweredRequest, Timeline, figures_by_category
from espalier.cli.main import main
from espalier.errors import EspalierError
from tests.worded import worded

SPEED = {"question_id": "1", "category": "code", "turns": ["a", "b"], "src_id": "x", "multiturn": True}
MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
SAID = {
    "speed": (SPEED, ("code", "", ["a", "b"])),
    "chat": (
        {"messages": [*MESSAGES, {"role": "assistant", "content": None}, {"role": "user", "content": "b"}]},
        ("", "s", ["a", "b"]),
    ),
    "sharegpt": (
        {"id": "x", "conversations": [{"from": "gpt", "value": "z"}, *({"from": "human", "value": v} for v in "ab")]},
        ("", "", ["a", "b"]),
    ),
    "prompt": ({"prompt": "a", "category": "c"}, ("c", "", ["a"])),
    "text": ({"text": "a"}, ("", "", ["a"])),
}


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "prompts"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def read(path, limit=None, seed=0):
    talks, left_out = read_conversations(path, (3, 5), limit, seed)
    return [(talk.category, talk.prefix, [turn.text for turn in talk.turns]) for talk in talks], left_out


@pytest.mark.parametrize("format", SAID)
@pytest.mark.parametrize("as_list", [False, True], ids=["lines", "list"])
def test_each_format_is_recognised_by_its_content(written, format, as_list):
    record, said = SAID[format]
    text = (
        json.dumps([record, record], indent=1) if as_list else f"\ufeff{json.dumps(record)}\r\n\n{json.dumps(record)}"
    )
    assert read(written(text)) == ([said, said], 0)
    talks, _ = read_conversations(written(text), (3, 5), None, 0)
    assert [talk.index for talk in talks] == [0, 1]
    assert all(3 <= turn.max_tokens <= 5 for talk in talks for turn in talk.turns)


def test_parquet_is_read_where_its_library_is(written, tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(arrow.Table.from_pylist([SPEED]), tmp_path / "test.parquet")
    assert read(tmp_path / "test.parquet") == ([SAID["speed"][1]], 0)
    with pytest.raises(EspalierError, match="no whole Parquet file"):
        read(written(b"PAR1 and no more"))


def test_a_limit_takes_as_many_of_each_category(written):
    records = [{"prompt": f"{name}{i}", "category": name} for name, count in (("x", 8), ("y", 2)) for i in range(count)]
    path = written("\n".join(map(json.dumps, records)))
    some, _ = read(path, 6)
    assert [category for category, *_ in some] == ["x"] * 4 + ["y"] * 2
    assert some == read(path, 6)[0] != read(path, 6, seed=1)[0]
    assert some == [each for each in read(path)[0] if each in some], "in the file's order"
    with pytest.raises(EspalierError, match="--limit=11 is above the 10 conversations"):
        read(path, 11)


def test_a_record_in_which_no_user_speaks_is_left_out_and_counted(written):
    silent = [{"conversations": []}, {"conversations": [{"from": "gpt", "value": "x"}, {"from": "human", "value": ""}]}]
    assert read(written(json.dumps([*silent, SAID["sharegpt"][0]]))) == ([SAID["sharegpt"][1]], 2)


FETCHED = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
BROKEN = {
    "": "holds no prompt",
    "[]": "holds no prompt",
    '{"prompt": "a"}\n{"prompt": ': "prompts:2: expected an object with",
    '[{"prompt": "a"},\n}': "prompts:2: expected an object with",
    '{"prompt": "a"}\n3': 'prompts:2: expected an object with "turns"',
    '{"prompt": "a"}\n{"said": "b"}': "prompts:2.*found an object without a prompt",
    '{"token_ids": [1]}': "found token ids, which are no text",
    '[{"prompt": "a"}, {"prompt": 1}]': "prompts, record 2.*found a text that is empty or none",
    '{"turns": "a"}': '"turns" that is no list',
    '{"turns": ["a", " "]}': "a text that is empty",
    json.dumps({"turns": [FETCHED]}): "prepare_data.py",
    '{"messages": [{"role": "usr", "content": "a"}]}': 'whose "role" is none of user',
    '{"conversations": [7]}': 'whose "from" is none of user',
    '{"prompt": "a", "category": 1}': '"category" that is no text',
    '{"prompt": "\\ud800"}': "UTF-16",
    "[" * 100_000: "not JSON that can be read",
    b"\xff\xfe": "use a UTF-8 text file",
}


@pytest.mark.parametrize("text", BROKEN, ids=lambda text: str(text)[:20])
def test_a_broken_file_is_refused_with_its_place_and_what_is_expected(written, text):
    with pytest.raises(EspalierError, match=BROKEN[text]) as refused:
        read(written(text))
    assert str(refused.value).startswith("--dataset") and "\n" not in str(refused.value)


KEYS = ("turns", "conversations", "messages", "prompt", "category", "role", "from", "content", "value", "x")
json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.sampled_from(("", "a", "user", "human", "system", "gpt", "\ud800")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)


@given(st.binary(max_size=40) | json_values.map(json.dumps) | st.lists(json_values.map(json.dumps)).map("\n".join))
@example(b"[1" + b"0" * 5000 + b"]")
def test_no_file_gives_more_than_a_refusal(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "drawn"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    try:
        talks, _ = read_conversations(path, (1, 1), None, 0)
    except EspalierError:
        return
    assert talks and all(turn.text.strip() for talk in talks for turn in talk.turns)


def test_speed_is_accept_length_over_the_time_of_a_round():
    first, second = Timeline(0.0, [(1.0, 1), (1.5, 3), (2.0, 2)]), Timeline(0.0, [(1.0, 1), (1.25, 1)])
    found = figures_by_category(
        [AnsweredRequest("a", first, 6, 2), AnsweredRequest("a", second, 2, 1), AnsweredRequest("b", second, 2, None)]
    )
    assert (found["a"]["accept_length"], found["a"]["step_ms"]) == (2.0, pytest.approx(1250 / 3))
    assert found["a"]["tokens_per_second"] == pytest.approx(1e3 * 2.0 / found["a"]["step_ms"])
    assert (found["b"]["accept_length"], found["b"]["step_ms"], found["b"]["tokens_per_second"]) == (None, None, 4.0)
    assert figures_by_category([AnsweredRequest("", Timeline(0.0, [(1.0, 1)]), 1, 0)])[""]["tokens_per_second"] is None


def test_a_dataset_is_reported_by_category(written, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["espalier", "bench", "load", "--api-key", "secret", "--api-key=secret"])
    path, out, tables = written(json.dumps([SPEED, {"prompt": "a"}])), tmp_path / "r", tmp_path / "m"
    flags = ["--output", "3,3", "--temperature", "1", "--think", "0", "--json", str(out), "--markdown", str(tables)]
    target, draft = map(str, worded())
    model = ["--model", target, "--draft", draft]
    assert main(["bench", "load", "--dataset", str(path), "--steps", "1", "--max-batch", "2", *flags, *model]) == 0
    report = json.loads(out.read_text())
    assert report["command"].endswith("--api-key ... --api-key=...") and "secret" not in tables.read_text()
    assert {"espalier", "torch", "transformers"} <= report["machine"].keys()
    assert report["config"]["draft"] and report["dataset"]["temperature"] == [1]
    [cell] = report["cells"]
    for way in ("tree", "plain"):
        categories = cell[way]["categories"]
        assert {name: each["requests"] for name, each in categories.items()} == {"code": 2, "": 1}
        for each in categories.values():
            assert {"accept_length", "step_ms", "ttft_ms", "between_pieces_ms"} <= each.keys()
    assert cell["plain"]["categories"]["code"]["accept_length"] == 1.0
    assert "temperature 1, plain" in capsys.readouterr().out and tables.read_text().count("| code | 2 |") == 2


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--dataset", "FILE", "--turns", "2"], "--turns draws prompts, and --dataset has its own"),
        (["--limit", "2"], "--limit is for --dataset; give a file too"),
        (["--dataset", "FILE", "--limit", "0"], "--limit=0"),
        (["--dataset", "FILE", "--temperature", "3"], "--temperature=3.0"),
        (["--dataset", "FILE", "--temperature", "nan"], "--temperature=nan"),
        (["--dataset", "/nowhere"], "--dataset /nowhere cannot be read"),
        (["--dataset", "FILE", "--thinking", "--model", "TARGET", "--draft", "DRAFT"], "chat template reads none of"),
        (
            ["--dataset", "FILE", "--output", "9,9000", "--model", "TARGET", "--draft", "DRAFT"],
            "may have .* tokens with its answers",
        ),
        (["--dataset", "FILE", "--markdown", "/nowhere/x"], "--markdown /nowhere/x cannot be written"),
        (["--dataset", "FILE", "--url", "http://x", "--endpoint", "completions", "--thinking"], "--endpoint chat"),
        (["--dataset", "FILE", "--url", "http://x", "--requests", "3"], "--requests draws prompts"),
    ],
)
def test_flags_that_do_not_fit_are_refused(written, capsys, flags, says):
    named = {"FILE": str(written('{"prompt": "a"}')), **dict(zip(("TARGET", "DRAFT"), map(str, worded()), strict=True))}
    assert main(["bench", "load", *(named.get(flag, flag) for flag in flags)]) == 2
    line = capsys.readouterr().err
    assert says.split(" .* ")[0] in line and says.split(" .* ")[-1] in line and line.count("\n") == 1
