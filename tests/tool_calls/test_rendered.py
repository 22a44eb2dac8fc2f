"""What a model writes is what is read: rendered calls and reasoning of every format, cut anywhere."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.tool_calls.formats import REASONING_FORMATS, TOOL_FORMATS, Formats
from espalier.tool_calls.parser import OutputParser, message_of

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "whether": {"type": "boolean"},
        "nothing": {"type": "null"},
        "list": {"type": "array"},
        "object": {"type": "object"},
    },
}
SCHEMAS = {"now": {"type": "object"}, "set_all": SCHEMA, "a.b-c": SCHEMA}
# No "<", "[" or "`": a mark inside a value written as plain text would end it.
TEXTS = st.text(st.sampled_from('ab 1"\\\n{}],:é日🙂\u2028'), max_size=8)
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(-9, 10**6), st.floats(-9, 9), TEXTS)
NESTED = st.recursive(LEAVES, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner)))
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXTS,
        "count": st.integers(-9, 10**20),
        "share": st.floats(-9, 9),
        "whether": st.booleans(),
        "nothing": st.none(),
        "list": st.lists(NESTED, max_size=2),
        "object": st.dictionaries(TEXTS, NESTED, max_size=2),
    },
)
# A call whose arguments are absent, empty, null, or these.
ABSENT, EMPTY, NULL = "absent", "empty", "null"
NOTHING = st.sampled_from([ABSENT, EMPTY, NULL])
CALLS = st.lists(
    st.one_of(
        # Its schema says of no value whether it is text, which XML does not say either.
        st.tuples(st.just("now"), NOTHING),
        st.tuples(st.sampled_from(["set_all", "a.b-c"]), st.one_of(NOTHING, ARGUMENTS)),
    ),
    max_size=3,
)
WORDS = st.sampled_from(["", "I look.", "x < y", "日本 {", "a\n\nb"])


def dumped(arguments):
    return json.dumps(arguments, ensure_ascii=False)


def as_object(key):
    def one(name, arguments):
        if arguments == ABSENT:
            return f'{{"name": "{name}"}}'
        text = filled(arguments, '""')
        return f'{{"name": "{name}", "{key}": {text}}}'

    return one


def filled(arguments, empty):
    """The JSON text of arguments.  empty: what stands for those that are empty."""
    return {EMPTY: empty, NULL: "null"}[arguments] if isinstance(arguments, str) else dumped(arguments)


def plain(value):
    return value if isinstance(value, str) else dumped(value)


def items(arguments):
    return {} if isinstance(arguments, str) else arguments


def hermes(calls):
    return "".join(f"\n<tool_call>\n{as_object('arguments')(*call)}\n</tool_call>" for call in calls)


def llama(calls):
    return "<|python_tag|>" + "; ".join(as_object("parameters")(*call) for call in calls)


def mistral_list(calls):
    return f"[TOOL_CALLS] [{', '.join(as_object('arguments')(*call) for call in calls)}]"


def mistral(calls):
    tails = {ABSENT: "", EMPTY: "[ARGS]", NULL: "[ARGS]null"}
    return "".join(
        f"[TOOL_CALLS]{name}" + (tails[args] if isinstance(args, str) else f"[ARGS]{dumped(args)}")
        for name, args in calls
    )


def deepseek(calls, block):
    def one(name, args):
        text = "" if args == ABSENT else filled(args, "")
        if block:
            tail = "" if args == ABSENT else f"\n```json\n{text}\n```"
            return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}{tail}<｜tool▁call▁end｜>"
        return f"<｜tool▁call▁begin｜>{name}" + "<｜tool▁sep｜>" * (args != ABSENT) + f"{text}<｜tool▁call▁end｜>"

    return f"<｜tool▁calls▁begin｜>{chr(10).join(one(*call) for call in calls)}<｜tool▁calls▁end｜>"


def qwen_coder(calls):
    def one(name, args):
        values = "".join(f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in items(args).items())
        end = "" if args == ABSENT else "</function>\n"
        return f"\n<tool_call>\n<function={name}>\n{values}{end}</tool_call>"

    return "".join(one(*call) for call in calls)


def glm(calls):
    def one(name, args):
        values = (f"<arg_key>{k}</arg_key>\n<arg_value>{plain(v)}</arg_value>\n" for k, v in items(args).items())
        return f"\n<tool_call>{name}\n{''.join(values)}</tool_call>"

    return "".join(one(*call) for call in calls)


def harmony(calls):
    def one(name, args):
        head = f"<|start|>assistant<|channel|>commentary to=functions.{name}"
        if args == ABSENT:
            return f"{head}<|call|>"
        return f"{head} <|constrain|>json<|message|>{filled(args, '')}<|call|>"

    return "".join(one(*call) for call in calls)


WRITTEN = {
    "hermes": hermes,
    "llama": llama,
    "mistral-list": mistral_list,
    "mistral": mistral,
    "deepseek-v3": lambda calls: deepseek(calls, True),
    "deepseek-v3.1": lambda calls: deepseek(calls, False),
    "qwen-coder": qwen_coder,
    "glm": glm,
    "harmony": harmony,
}
MARKS = {mark for each in (*TOOL_FORMATS.values(), *REASONING_FORMATS.values()) for mark in each.special_tokens}


def output(name, reasoning, thoughts, content, calls, ends):
    """An answer as a model of this format writes it."""
    tail = WRITTEN[name](calls) if calls else ""
    if name == "harmony":
        said = f"<|start|>assistant to=assistant<|channel|>commentary<|message|>{content}<|end|>" if content else ""
        return f"<|channel|>analysis<|message|>{thoughts}<|end|>{said}{tail}"
    return f"{reasoning.begin_marker}\n{thoughts}\n{reasoning.end_marker * ends}\n\n{content}{tail}"


@pytest.mark.parametrize("name", TOOL_FORMATS)
@settings(max_examples=12)
@given(data=st.data())
def test_what_is_written_is_read(name, data):
    """Calls, content and reasoning, wherever the text is cut, and wherever the prompt ends inside the reasoning."""
    calls, content, thoughts = data.draw(CALLS), data.draw(WORDS), data.draw(WORDS.filter(bool))
    reasoning = REASONING_FORMATS[data.draw(st.sampled_from(["think", "mistral"])) if name != "harmony" else name]
    text = output(name, reasoning, thoughts, content, calls, data.draw(st.integers(1, 2)))
    first = text.index(thoughts) + data.draw(st.integers(0, len(thoughts)))
    answer_start = text[:first] if data.draw(st.booleans()) else ""
    repeated = "" if name == "harmony" or not answer_start else data.draw(st.sampled_from(["", reasoning.begin_marker]))
    written = repeated + text[len(answer_start) :]
    parser = OutputParser(Formats(TOOL_FORMATS[name], reasoning), SCHEMAS, answer_start)
    places = sorted(data.draw(st.sets(st.integers(0, len(written)), max_size=6)))
    parts = [written[a:b] for a, b in zip([0, *places], [*places, len(written)], strict=True)]
    message = message_of([delta for part in parts for delta in parser.feed(part)] + parser.finish())
    expected = [(call, {} if isinstance(arguments, str) else arguments) for call, arguments in calls]
    assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == expected, written
    assert (message.content, message.errors) == (content, []), written
    rest = thoughts[first - text.index(thoughts) :] if answer_start else thoughts
    assert message.reasoning.strip("\n") == rest.strip("\n")
    assert not any(mark in message.content for mark in MARKS)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("harmony", "<|channel|>commentary to=functions.now<|message|>"),
        ("harmony", "<|channel|>commentary to=functions.now"),
        ("mistral", "[TOOL_CALLS]now[ARGS]"),
        ("mistral", "[TOOL_CALLS]now"),
        ("deepseek-v3.1", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>"),
    ],
)
def test_arguments_that_were_cut_off_are_not_empty_ones(name, text):
    """Where an output ends by itself they are absent; where it was cut off the call is broken."""
    for is_cut_off in (False, True):
        parser = OutputParser(Formats(TOOL_FORMATS[name], REASONING_FORMATS.get(name)), SCHEMAS)
        message = message_of(parser.feed(text) + parser.finish(is_cut_off))
        assert [call.arguments for call in message.tool_calls] == ["{}"] * (not is_cut_off)
        assert len(message.errors) == is_cut_off
