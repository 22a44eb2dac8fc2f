"""The bundled model's tokenizer: byte-level BPE for Python source, saved in a directory for `AutoTokenizer`.

A run of spaces (indentation) or of newlines is a pre-token by itself.  So a prompt that ends after a line or an indent
is split as the training text was.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT, USER, ASSISTANT, END = "<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL_TOKENS = [END_OF_TEXT, USER, ASSISTANT, END]
VOCAB_SIZE = 6144

# In order: newlines; indentation; words with a leading space or dot; one digit; punctuation; other white space.
PATTERN = r"\n+| {2,}|[ .]?[\p{L}_]+| ?\p{N}| ?[^\s\p{L}\p{N}_]+|\s+"

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
<|assistant|>{{ message['content'] }}<|end|>
{%- elif message['role'] in ['user', 'system'] -%}
<|user|>{{ message['content'] }}
{%- else -%}
{{ raise_exception('roles are system, user and assistant, not ' + message['role']) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=32,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos = tokenizer.token_to_id(END_OF_TEXT)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A",
        pair=f"{END_OF_TEXT} $A {END_OF_TEXT} $B",
        special_tokens=[(END_OF_TEXT, bos)],
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, out: Path, max_length: int) -> None:
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        extra_special_tokens=[USER, ASSISTANT, END],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
    ).save_pretrained(str(out))
