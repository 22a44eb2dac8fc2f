"""A conversation becomes the prompt that its template writes, and special tokens are the template's alone."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from espalier.chat import run_steps
from espalier.errors import EspalierError
from espalier.text import Tokenizer

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
PIECES = ["<unk>", "▁", "a", "▁a", "b", "!", *(f"<0x{byte:02X}>" for byte in range(256))]


def byte_level():
    backend = Backend(
        models.BPE(vocab={piece: i for i, piece in enumerate([*BYTES, "ab", "!!"])}, merges=[("a", "b"), ("!", "!")])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def sentencepiece():
    """A space is put before the text, and before what follows a special token."""
    backend = Backend(
        models.BPE(
            vocab={p: i for i, p in enumerate(PIECES)}, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def unigram():
    """Its pieces hold the special tokens too, as files made from SentencePiece's do."""
    pieces = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "▁", *(chr(c) for c in range(33, 127)), *"\n\t"]
    backend = Backend(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    return backend


def with_tokens(backend, special, others=(), **flags):
    backend.add_special_tokens([AddedToken(name, normalized=False, special=True, **flags) for name in special])
    backend.add_tokens([AddedToken(name, normalized=False, special=False) for name in others])
    return backend


def family(make, template, special, others=(), **flags):
    return Tokenizer(
        PreTrainedTokenizerFast(tokenizer_object=with_tokens(make(), special, others, **flags), chat_template=template)
    )


def chat(tokenizer, messages, **options):
    return run_steps(tokenizer.template.encode_steps(messages, options), tokenizer.template.render)


# What families do with a message, one trait each: headers of several tokens, thoughts that are cut out, trimming, a
# role that becomes part of a token, a system message put into the first turn, arguments as JSON, images taken out.
FAMILIES = {
    "headers, trimmed": family(
        byte_level,
        "{{ '<bos>' }}{% for m in messages %}{{ '<|start|>' + m.role + '<|stop|>\n\n' + m.content | trim + '<|eot|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant<|stop|>\n\n' }}{% endif %}",
        ["<bos>", "<|start|>", "<|stop|>", "<|eot|>", *(f"<|spare_{i}|>" for i in range(40))],
    ),
    "thoughts cut out": family(
        byte_level,
        "{% for m in messages %}{% set said = m.content %}{% if m.role == 'assistant' and '</think>' in said %}"
        "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}"
        "{% if said.startswith('<result>') %}{{ '<|result|>' }}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ said }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
        ["<|im_start|>", "<|im_end|>", "<|result|>"],
        ["<think>", "</think>", "<result>"],
    ),
    "instructions": family(
        unigram,
        "<s>{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content.strip() }}</s>"
        "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}",
        ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"],
    ),
    "a token of the role": family(
        sentencepiece,
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>"],
        rstrip=True,
    ),
    "turns, trimmed": family(
        sentencepiece,
        "<bos>{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n"
        "{{ m.content | trim }}<end_of_turn>\n{% endfor %}",
        ["<bos>", "<start_of_turn>", "<end_of_turn>"],
    ),
    "not special by its file": family(
        byte_level,
        "{% for m in messages %}{{ '<｜User｜>' if m.role == 'user' else '<｜Assistant｜>' }}"
        "{{ m.content | replace('<image>', '') }}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}",
        [],
        ["<｜User｜>", "<｜Assistant｜>", "<image>"],
    ),
    "quoted": family(
        byte_level,
        "{% for m in messages %}<|turn|>{{ {'said': m.content} | tojson }}"
        "<{{ m.name }}>{{ m.content | upper }}{% endfor %}",
        ["<|turn|>", "<|TURN|>", "!!"],
    ),
}
NAMES = {
    name: sorted(t.content for t in family.hf.added_tokens_decoder.values() if t.special or "｜" in t.content)
    for name, family in FAMILIES.items()
}
ROLES = ("user", "assistant", "user")


def conversation(*contents):
    return [
        {"role": role, "content": content, "name": content[:9]} for role, content in zip(ROLES, contents, strict=False)
    ]


def control_tokens(tokenizer, name, tokens):
    """Without the unknown one, which is no part of a turn and stands for what no piece spells."""
    ids = {tokenizer.hf.convert_tokens_to_ids(each) for each in NAMES[name] if each != "<unk>"}
    return [token for token in tokens if token in ids]


def pieces_of(name, whole=True):
    """Special tokens, halves of them, and what templates look for and cut out."""
    names = NAMES[name]
    halves = [
        half for each in names for cut in (1, 2, len(each) // 2, len(each) - 1) for half in (each[:cut], each[cut:])
    ]
    others = ["<think>", "</think>", "<image>", "<result>", "\n", "  ", "a b", "ab!", "é", '"', "<", ">", "|"]
    return st.lists(st.sampled_from([*names * whole, *halves, *others]), max_size=6).map("".join)


# Each draws for one of seven templates.
few_examples = settings(max_examples=settings.default.max_examples // 2)


@pytest.mark.parametrize("name", FAMILIES)
@few_examples
@given(data=st.data())
def test_what_a_message_spells_is_never_a_special_token(name, data):
    tokenizer = FAMILIES[name]
    messages = conversation(*(data.draw(pieces_of(name)) for _ in range(3)))
    harmless = conversation(*("<result>" * (m["content"].startswith("<result>")) + "ab" for m in messages))
    found, expected = (control_tokens(tokenizer, name, chat(tokenizer, each)) for each in (messages, harmless))
    assert found == expected


@pytest.mark.parametrize("text", ["hi", "what is <|im_end|>?"])
def test_a_template_finds_names_that_are_parts_of_special_tokens(text):
    """Of a call and of a tool, as Qwen's templates read them; names that a client chose stay text."""
    special = ["<|im_end|>", "<repo_name>", "<function>", "<arguments>", "<parameters>"]
    calls = "{% for c in m.tool_calls or [] %}{% if c.type == 'function' %}{{ c.function.name + '(' }}" + (
        "{{ c.function.arguments | tojson }}){% endif %}{% endfor %}"
    )
    tools = "{% for t in tools %}{{ t.function.name + ': ' + t.function.parameters | tojson }}\n{% endfor %}"
    template = f"{tools}{{% for m in messages %}}{{{{ m.content or '' }}}}{calls}<|im_end|>{{% endfor %}}"
    function = {"name": "get", "arguments": {"name": 1, "<|im_end|>": 2}}
    call = {"type": "function", "function": function}
    said = [{"role": "user", "content": text}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    parameters = {"type": "object", "properties": {"<repo_name>": {"type": "integer"}}}
    offered = [{"type": "function", "function": {"name": "get", "parameters": parameters}}]
    tokenizer = family(byte_level, template, special)
    tokens = chat(tokenizer, said, tools=offered)
    expected = tokenizer.hf.apply_chat_template(said, tools=offered, tokenize=False)
    assert tokenizer.decode(tokens, skip_special_tokens=False) == expected
    ids = tokenizer.hf.convert_tokens_to_ids(special)
    assert [token for token in tokens if token in ids] == [ids[0]] * 2


@pytest.mark.parametrize("name", FAMILIES)
@few_examples
@given(data=st.data())
def test_a_message_without_them_becomes_what_transformers_makes_of_it(name, data):
    tokenizer = FAMILIES[name]
    messages = conversation(*(data.draw(pieces_of(name, whole=False)) for _ in range(3)))
    text = tokenizer.hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    harmless = tokenizer.hf.apply_chat_template(
        conversation("ab", "ab", "ab"), tokenize=False, add_generation_prompt=True
    )
    assume(not any(special in message["content"] for message in messages for special in NAMES[name]))
    # Nor do they become one where the template puts them together.
    assume(all(text.count(special) == harmless.count(special) for special in NAMES[name]))
    expected = tokenizer.hf.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert chat(tokenizer, messages) == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_message_spells_reads_as_it_was_written(name):
    tokenizer = FAMILIES[name]
    spelled = "".join(NAMES[name]).replace("<unk>", "").upper() if name == "quoted" else "".join(NAMES[name])
    messages = conversation(f"a{spelled}b", "ab", "ab")
    text = tokenizer.hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    tokens = chat(tokenizer, messages)
    assert tokenizer.decode(tokens, skip_special_tokens=False).replace(" ", "") == text.replace(" ", "")
    allowed = chat(tokenizer, messages, allow_special_tokens_in_messages=True)
    assert allowed == tokenizer.hf.apply_chat_template(messages, add_generation_prompt=True)["input_ids"] != tokens


@pytest.mark.parametrize("name", FAMILIES)
def test_the_copy_that_reads_them_as_text_reads_all_else_alike(name):
    tokenizer = FAMILIES[name]
    special = tokenizer.template.special_tokens
    for said in ("ab", " a b!", "é\n", "<think>b</think>", "<|", ""):
        messages = conversation(said, said, said)
        text = tokenizer.hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt = special.remove_marks(text, mark="never")
        assert special.encode(prompt, add_special_tokens=False) == chat(tokenizer, messages)


TOOLS = [{"type": "function", "function": {"name": "|stop|", "parameters": {"<|stop|>": 1}}}]
TOOL_TEMPLATE = (
    "{% for t in tools or [] %}<{{ t.function.name }}>{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}<|turn|>{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}"
    "{% endfor %}<|stop|>{% endfor %}"
)


def test_tools_their_calls_and_their_results_spell_none():
    tokenizer = family(byte_level, TOOL_TEMPLATE, ["<|turn|>", "<|stop|>"])
    call = {"function": {"name": "f", "arguments": {"<|turn|>": ["<|stop|>"]}}}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "text", "text": "<|turn|>"}]},
    ]
    turn, stop = tokenizer.hf.convert_tokens_to_ids(["<|turn|>", "<|stop|>"])
    tokens = chat(tokenizer, messages, tools=TOOLS)
    assert [token for token in tokens if token in (turn, stop)] == [turn, stop, turn, stop]
    expected = tokenizer.hf.apply_chat_template(messages, tools=TOOLS, tokenize=False)
    assert tokenizer.decode(tokens, skip_special_tokens=False) == expected


def test_a_tokenizer_that_cannot_keep_them_as_text_says_so():
    tokenizer = family(byte_level, "<|turn|>{{ messages[0].content }}", ["<|turn|>"])
    tokenizer.template.special_tokens.backend = None
    chat(tokenizer, conversation("a<|b"))
    with pytest.raises(
        EspalierError, match=r"contain special tokens, which this model's tokenizer cannot keep as text"
    ):
        chat(tokenizer, conversation("<|turn|>"))


def conversing(template):
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=byte_level(), chat_template=template))


def test_a_chat_template_takes_its_variables_and_no_others():
    # Its generation and break tags are extensions that transformers makes.
    tokenizer = conversing(
        "{% set mood = mood | default('') %}{%- if think is defined and not think %}a{% endif %}{{ mood }}"
        "{% for said in messages %}{% generation %}{{ said.content }}{% endgeneration %}{% break %}{% endfor %}"
    )
    hello = [{"role": "user", "content": "b"}]

    def said(**variables):
        return tokenizer.decode(chat(tokenizer, hello, chat_template_kwargs=variables))

    assert (said(), said(think=True), said(think=False)) == ("b", "b", "ab")
    assert said(mood="a") == "ab"
    assert chat(tokenizer, hello, chat_template_kwargs=None) == chat(tokenizer, hello)
    # The last are in it, and no variables that it reads.
    for name in ("thinks", "b", "if", "said", "content", "default"):
        with pytest.raises(EspalierError, match=f"chat_template_kwargs entry='{name}' is not read by this model's"):
            said(**{name: 1})
    # Whatever the template reads: these would change what the caller asks for, or what he gets.
    for name in ("messages", "conversation", "documents", "tokenize", "return_dict", "padding"):
        with pytest.raises(EspalierError, match=f"chat_template_kwargs entry='{name}' is set by the engine"):
            said(**{name: 1})
    for name in ("add_generation_prompt", "continue_final_message", "tools"):
        with pytest.raises(EspalierError, match=f"chat_template_kwargs entry='{name}' is not a template variable here"):
            said(**{name: True})


@pytest.mark.parametrize(
    ("name", "value"),
    [("chat_template_kwargs", ["a"]), ("add_generation_prompt", "no"), ("continue_final_message", 1)],
)
def test_an_option_of_a_conversation_that_is_of_another_type_is_refused(name, value):
    with pytest.raises(EspalierError, match=f"^{name}=.* is not supported; use "):
        chat(conversing("{{ messages[0].content }}"), [{"role": "user", "content": "b"}], **{name: value})


def test_a_conversation_ends_where_the_answer_begins_or_goes_on():
    tokenizer = conversing(
        "{% for m in messages %}<{{ m.content | trim }}>{% endfor %}{% if add_generation_prompt %}<{% endif %}"
    )

    def said(last="b", **options):
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": last}]
        return tokenizer.decode(chat(tokenizer, messages, **options))

    assert said() == said(add_generation_prompt=True) == said(continue_final_message=False) == "<a><b><"
    assert said(add_generation_prompt=False) == "<a><b>"
    assert said(continue_final_message=True) == "<a><b"
    assert said(continue_final_message=True, add_generation_prompt=False) == "<a><b"
    with pytest.raises(EspalierError, match="continue_final_message excludes add_generation_prompt"):
        said(continue_final_message=True, add_generation_prompt=True)
    called = {"role": "assistant", "content": "b", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    with pytest.raises(EspalierError, match="cannot continue a message with tool_calls"):
        chat(conversing("{{ messages[-1].tool_calls }}"), [called], continue_final_message=True)
    hidden = conversing("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    with pytest.raises(EspalierError, match="the chat template refuses these messages: continue_final_message is set"):
        chat(hidden, [{"role": "assistant", "content": "b"}], continue_final_message=True)


def test_a_chat_template_that_cannot_be_read_is_said_so():
    for template, variables in (("{% if %}", {}), ("{{ 'x }} think", {"think": 1})):
        with pytest.raises(EspalierError, match=r"chat template is no Jinja template .*; correct it"):
            chat(conversing(template), [{"role": "user", "content": "b"}], chat_template_kwargs=variables)
