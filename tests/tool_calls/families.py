"""Small chat templates in the syntax of each family, tokenizers with its special tokens, and outputs of such models.

The outputs have the calls CALLS, after the content and the reasoning that stand with them.
"""

from dataclasses import dataclass

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from espalier.text import Tokenizer

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "units": {"enum": ["C", "F"]},
                "options": {"type": "object"},
            },
            "required": ["city"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
# Quotes, a line break, a backslash, brackets, and letters of several bytes.
ARGUMENTS = {"city": 'Zü"rich\\\n} 日本', "days": 2, "options": {"a": [1, {"b": None}]}}
CALLS = [("get_weather", ARGUMENTS), ("now", {})]
WEATHER_JSON = '{"city": "Zü\\"rich\\\\\\n} 日本", "days": 2, "options": {"a": [1, {"b": null}]}}'


@dataclass(frozen=True)
class Family:
    """tools, reasoning: names of the formats; output: as the model writes it; calls: how many of CALLS it has."""

    tools: str
    reasoning: str | None
    template: str
    special: tuple[str, ...]
    output: str
    content: str = ""
    thoughts: str = ""
    opens: bool = False
    calls: int = 2

    def tokenizer(self) -> Tokenizer:
        return Tokenizer(self.hf())

    def hf(self) -> PreTrainedTokenizerFast:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        names = [*self.special, "<eos>"]
        backend.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
        return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=self.template, eos_token="<eos>")


MESSAGES = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
SHOWN = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
THINKS = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
HERMES = (
    SHOWN + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n" + THINKS
)
CODER = SHOWN + MESSAGES + "{# <tool_call> <function= <parameter= #}<|im_start|>assistant\n"
LLAMA = (
    SHOWN + "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>"
    "{% for c in m.tool_calls or [] %}<|python_tag|>"
    '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}{% endfor %}{% endfor %}'
)
MISTRAL = (
    "[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% for m in messages %}{% if m.tool_calls %}"
    "[TOOL_CALLS]{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('ids have length 9') }}"
    "{% endif %}{{ c.function | tojson }}{% endfor %}{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}"
)
DEEPSEEK = (
    SHOWN + "{% for m in messages %}<｜User｜>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '<｜tool▁calls▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments }}{% endfor %}{% endfor %}"
    "<｜Assistant｜>"
)
GLM = SHOWN + MESSAGES + "{# <tool_call> <arg_key> #}<|im_start|>assistant\n" + THINKS
HARMONY = (
    SHOWN + "{% for m in messages %}<|start|>{{ m.role }}{% if m.thinking %}<|channel|>analysis<|message|>"
    "{{ m.thinking }}<|end|>{% endif %}<|message|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.arguments | tojson }}{% endfor %}<|end|>{% endfor %}<|start|>assistant"
)
TURNS = ("<|im_start|>", "<|im_end|>")
DEEPSEEK_TOKENS = (
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
)
FAMILIES = {
    "hermes": Family(
        "hermes",
        "think",
        HERMES,
        TURNS,
        "<think>\nWhich? <b>\n</think>\n\nI look.\n<tool_call>\n"
        f'{{"name": "get_weather", "arguments": {WEATHER_JSON}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "I look.",
        "Which? <b>",
    ),
    "hermes, marks as special tokens": Family(
        "hermes",
        "think",
        HERMES + "<think>\n",
        (*TURNS, "<tool_call>", "</tool_call>", "<think>", "</think>"),
        f'Which?\n</think>\n<tool_call>{{"arguments": {WEATHER_JSON}, "name": "get_weather"}}</tool_call>'
        '<tool_call> {"name": "now"}',
        "",
        "Which?",
        opens=True,
    ),
    "qwen-coder": Family(
        "qwen-coder",
        None,
        CODER,
        TURNS,
        "I look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\n" + ARGUMENTS["city"] + "\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n<parameter=options>\n"
        '{"a": [1, {"b": null}]}\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "I look.",
    ),
    "llama": Family(
        "llama",
        None,
        LLAMA,
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
        f'{{"name": "get_weather", "parameters": {WEATHER_JSON}}}; {{"name": "now", "parameters": {{}}}}',
    ),
    "llama, tag": Family(
        "llama",
        None,
        LLAMA,
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
        f'<|python_tag|>{{"type": "function", "name": "get_weather", "parameters": {WEATHER_JSON}}}'
        '<|python_tag|>{"name": "now", "parameters": {}}',
    ),
    "mistral-list": Family(
        "mistral-list",
        None,
        MISTRAL,
        ("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[INST]", "[/INST]", "[TOOL_CALLS]"),
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {WEATHER_JSON}}}, {{"name": "now", "arguments": {{}}}}]',
    ),
    "mistral": Family(
        "mistral",
        "mistral",
        MISTRAL + "{# [ARGS] [THINK] #}",
        ("[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
        f"[THINK]Which?[/THINK]I look.[TOOL_CALLS]get_weather[ARGS]{WEATHER_JSON}"
        "[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{}",
        "I look.",
        "Which?",
    ),
    "deepseek-v3": Family(
        "deepseek-v3",
        "think",
        DEEPSEEK + "{# ```json #}<think>\n",
        DEEPSEEK_TOKENS,
        "Which?</think>\n\nI look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        f"```json\n{WEATHER_JSON}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "I look.",
        "Which?",
        opens=True,
    ),
    "deepseek-v3.1": Family(
        "deepseek-v3.1",
        "think",
        DEEPSEEK + "</think>",
        DEEPSEEK_TOKENS,
        f"I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{WEATHER_JSON}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "I look.",
    ),
    "glm": Family(
        "glm",
        "think",
        GLM,
        (*TURNS, "<tool_call>", "</tool_call>"),
        "\n<think>Which?</think>\nI look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>"
        + ARGUMENTS["city"]
        + "</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n<arg_key>options</arg_key>\n"
        '<arg_value>{"a": [1, {"b": null}]}</arg_value>\n</tool_call>\n<tool_call>now</tool_call>',
        "I look.",
        "Which?",
    ),
    "harmony": Family(
        "harmony",
        "harmony",
        HARMONY,
        ("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|return|>"),
        "<|channel|>analysis<|message|>Which?<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
        "<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        f"{WEATHER_JSON}<|call|><|start|>assistant to=functions.now<|channel|>commentary json<|message|>{{}}",
        "I look.",
        "Which?",
    ),
}
