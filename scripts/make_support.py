"""Write docs/support.md from the declarations that the code checks: `python scripts/make_support.py`."""

import sys
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

# The package of this clone, also where another one is installed.
sys.path.insert(0, str(Path(__file__).parents[1]))

from espalier.attention import BACKENDS
from espalier.attention.support import support_matrix
from espalier.cache.layer_spec import KVHeads, LatentKV
from espalier.grammar import KINDS
from espalier.grammar.formats import ANNOTATION_FORMATS, INTEGER_BOUNDS
from espalier.grammar.formats import FORMATS as STRING_FORMATS
from espalier.grammar.schema import ANNOTATION_KEYWORDS, COMBINATORS, KEYWORDS_OF
from espalier.grammar.schema_values import MAX_ENUM_SIZE, MAX_MULTIPLE_OF
from espalier.kernels.layers.blocks import BLOCK_TYPES
from espalier.layout import MAX_PAGE_SIZE
from espalier.models.block import MARKOV_HEAD_TYPES
from espalier.models.config import NEUTRAL_VALUES, Family
from espalier.models.draft import MAX_MODULES
from espalier.models.families import FAMILIES
from espalier.models.gguf_config import ARCHITECTURES
from espalier.models.loading import KV_SCALE_NAMES
from espalier.models.rope import ROPE_TYPES as ROPE_TYPES
from espalier.models.weight_formats import FORMATS, QUANTISATION_FIELDS
from espalier.models.weight_formats.e2m1 import KV_SCALE_STRATEGIES
from espalier.request import SamplingParams
from espalier.speculate.drafters.base import DraftFormat
from espalier.speculate.drafters.registry import DRAFT_FORMATS, UNSUPPORTED_DRAFTS, UNSUPPORTED_MTP, WITHOUT_FILES

PAGE = Path(__file__).parents[1] / "docs" / "support.md"
BY_LIBRARIES = """\
`auto` takes the first of these that is installed and supports the device, the dtype and the layers. "By our kernels"
means that the library does not support it, so our kernels attend to these rows, and the results are merged
(`espalier/attention/library.py`). If its library is missing, a backend is refused with the command that installs it.
The limits of the libraries, as error messages give them:"""
NO_FILES = {"ngram": "lookup in the request's own text", "none": "plain decoding"}


def yes(value: bool) -> str:
    return "yes" if value else "no"


def codes(values: Iterable[object]) -> str:
    return ", ".join(f"`{value}`" for value in values)


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def backends() -> str:
    supports = [made.support for made in BACKENDS.values()]
    head, rows = support_matrix(supports)
    limited = [[f"`{each.name}`", key, why] for each in supports for key, why in each.limit_reasons.items()]
    of_libraries = table(["backend", "limit of", "the library"], limited)
    return f"{table([codes([name]) if name else '' for name in head], rows)}\n\n{BY_LIBRARIES}\n\n{of_libraries}"


def targets() -> str:
    def row(f: Family) -> list[str]:
        keeps = LatentKV.kind if f.uses_mla else KVHeads.kind
        return [
            f"`{f.architecture}`",
            f"`{f.model_type}`",
            keeps,
            f"by `{f.qk_norm}`" if isinstance(f.qk_norm, str) else yes(f.qk_norm),
            yes(f.usable_in_drafts),
            yes(f.mtp is not None),
            codes(f.multimodal_architectures) or "-",
            codes(f.supported_fields) or "-",
        ]

    head = ["architecture", "model_type", "layers keep", "q and k norms", "in drafts", "own MTP layers"]
    head += ["text part of", "fields with any value"]
    return table(head, map(row, FAMILIES.values()))


# Of formats whose checkpoints ask for inputs in 4 bits.
W4A4 = ", with a warning where the checkpoint asks for 4 bits (W4A4)"


def gguf_architectures() -> str:
    return codes(ARCHITECTURES)


def quantised() -> str:
    as_is = "as they are"
    rows = [
        [
            "fp8",
            "E4M3: one scale, or blocks (`weight_block_size`, powers of two from 16, as 128 × 128)",
            "dynamic, by row or by the columns of a block; static with one scale",
        ],
        [
            "compressed-tensors",
            "`float-quantized`, `naive-quantized`: E4M3 by `tensor`, `channel` or `block`",
            "as they are; dynamic by `token` or `group`; static by `tensor`",
        ],
        [
            "compressed-tensors",
            "`pack-quantized`: 4 bits by `group` or `channel`, symmetric or with zero points, `actorder`",
            as_is,
        ],
        [
            "compressed-tensors",
            "`nvfp4-pack-quantized`: E2M1 in groups of 16 with scales in E4M3, and a divisor in float32",
            as_is + W4A4,
        ],
        [
            "modelopt",
            "`quant_algo` FP8, in config.json or hf_quant_config.json: E4M3, one scale",
            "static with one scale",
        ],
        ["modelopt", "`quant_algo` NVFP4, W4A16_NVFP4: as above, with a factor", as_is + W4A4],
        ["modelopt", "`quant_algo` MIXED_PRECISION: one of these for each of `quantized_layers`", "as of each"],
        ["gguf", f"files of llama.cpp (below): {', '.join(BLOCK_TYPES)}", as_is],
        ["awq", "4 bits, `gemm`, with zero points", as_is],
        ["gptq", "4 bits, `gptq` or `gptq_v2`, `desc_act`", as_is],
        ["mxfp4", "GPT-OSS's experts", as_is],
    ]
    assert {name for name, *_ in rows} == {name for name in FORMATS if name is not None}
    return table(["`quant_method`", "weights", "inputs"], ([f"`{name}`", *columns] for name, *columns in rows))


def kv_scale_names() -> str:
    return "; ".join(codes(dict.fromkeys(names)) for names in KV_SCALE_NAMES)


def drafters() -> str:
    def row(d: DraftFormat) -> list[str]:
        marked = (
            f"; with {' or '.join(f'`{name}`' for name in d.marker_fields)}: {codes(d.marked_architectures)}"
            if d.marked_architectures
            else ""
        )
        return [f"`{d.algorithm}`", d.title, codes(d.architectures) + marked, codes(d.speculators_types) or "-"]

    others = [[f"`{name}`", NO_FILES[name], "needs no files", "-"] for name in WITHOUT_FILES]
    head = ["algorithm", "what it is", "`architectures` of its config.json", "`speculators_model_type`"]
    return table(head, [*map(row, DRAFT_FORMATS.values()), *others])


def drafts_not_built() -> str:
    return ", ".join(sorted({*UNSUPPORTED_DRAFTS.values()}))


def not_built() -> str:
    return ", ".join(sorted({*UNSUPPORTED_MTP.values()}))


def sampling() -> str:
    return table(["parameter", "meaning"], ([f"`{f.name}`", f.metadata["help"]] for f in fields(SamplingParams)))


def schemas() -> str:
    rows = ([f"`{name}`", codes(sorted(known)) or "-"] for name, known in KEYWORDS_OF.items())
    return table(["type", "enforced"], rows)


def annotating() -> str:
    return "; ".join(f"for `{name}`, {codes(sorted(formats))}" for name, formats in ANNOTATION_FORMATS.items())


def neutral() -> str:
    def plain(value: object) -> str:
        return "absent" if value is None else f"`{value}`"

    def row(name: str) -> list[str]:
        values = supported[name]
        distinct = [value for i, value in enumerate(values) if value not in values[:i]]  # 0 and 0.0 are one
        return [f"`{name}`", ", ".join(map(plain, distinct))]

    supported = {**dict.fromkeys(QUANTISATION_FIELDS, tuple(FORMATS)), **NEUTRAL_VALUES}
    return table(["field", "supported"], map(row, supported))


def render() -> str:
    return f"""# What combines with what

`scripts/make_support.py` makes this page from the declarations that the engine checks; a test compares the two. What is
not listed here is refused at start, by name.

A backend runs every target and every drafter below if its column supports their layers. Trees, page sizes, the prefix
cache, chunked prefill, overlap and lock-step combine freely with them and with each other, except where the column says
otherwise.

## Attention backends

{backends()}

## Targets

{targets()}

### Models by transformers

An architecture that is not in this table runs by its class in transformers, if that class can be a target
(`model_impl="auto"`, `--model-impl`). `native` refuses such an architecture; `transformers` takes the class for those
of the table too. `espalier doctor --model path/to/model` says which of the two runs a model, and which of the class's
modules are replaced by ours. `python scripts/any_model.py` tries every causal class of the installed transformers.

Refused by name, before weights are read, is a class

- that keeps recurrent state, or is half of an encoder-decoder;
- whose attention does not go through transformers' `AttentionInterface`, or several times in a layer;
- whose rows see more or less than the rows before them within a window (ALiBi, chunked attention, masks of its own);
- that reads values on the host while it runs;
- whose config describes models of images or sound beside that of text.

Quantised weights are not supported there, nor code that comes with a checkpoint.

### MTP layers and memory

If a target's directory has MTP layers (`num_nextn_predict_layers`), they are its draft, unless you set another draft
or algorithm.

One GPU has to hold the weights: two bytes a parameter in bfloat16, one byte in FP8, half a byte in 4 bits. The sizes
here are for bfloat16. These fit no GPU: DeepSeek-V3, V3.1 and R1 (671 billion parameters, 1.34 TB), DeepSeek-V2 (236
billion, 472 GB) and GLM-4.5 (355 billion, 710 GB). GLM-4.5-Air (106 billion, 212 GB) and dots.llm1 (142 billion, 284
GB) need a GPU of that memory. DeepSeek-V2-Lite (16 billion, 32 GB) and GLM-4.7-Flash (30 billion, 60 GB) fit one of 80
GB.

Supported are rope scaling of types {codes(ROPE_TYPES)}; sliding windows per
layer; tied or own output head; biases; attention sinks; weights in one safetensors file or in shards. A family supports
any value of the fields in its last column. Its EAGLE-3 heads have a dense MLP; "in drafts" says whether a draft's own
layers may be the family's. Of a multimodal checkpoint ("text part of") only the text part is loaded, and requests with
images are refused. A model with LongRoPE keeps to the frequencies of long texts if `--max-context` is above its
original length, else to those of short ones; the log says which.

## Quantised weights

Targets and drafts may be quantised; `quant_method` in config.json names the format. Layers that the checkpoint leaves
out stay dense, whether config.json names them or only the files hold them so. A draft, or MTP layers, may be in another
format than its target, and projections that are computed together may be in several. A scheme that is not in this table
is refused by name when config.json is read.

{quantised()}

A GPU needs compute capability 8.9 for FP8, and bfloat16 for MXFP4 and NVFP4. A CPU does not round inputs. Experts may
have every format but `gguf`, no static input scales of their own and no `desc_act` orders of their own. This command
writes a quantised copy of a target or a draft: `espalier quantize path/to/model --to fp8 --out DIR`.

## GGUF files

A `.gguf` file, the first of several of one model, or a directory whose only weights are one, is a model wherever a
path is taken: `espalier serve model.gguf`. Its architecture is one of {gguf_architectures()}. Config, tokenizer
and chat template come from the file, or the last two from files beside it if it has none; tokenizers need
transformers 5.24. A field that is not understood is refused by
name, and so is a block type that is not in the table above; F16, BF16 and F32 are dense. Blocks stay as they are in the
file, also those of a tied head; the embedding becomes a table in the model's dtype. Drafts are not read from GGUF, but
any draft may serve such a target.

## K and V in FP8

`--kv-dtype fp8_e4m3` stores K and V, or latent rows, in one byte a number. That is half of bfloat16, so the same memory
holds twice as many tokens: llama-3.1-8b takes 65,536 bytes a token instead of 131,072, DeepSeek-V3 35,136 instead of
70,272. `espalier doctor` and the log at start say how many tokens the pages hold.

By default the KV cache has the dtype that the checkpoint's `kv_cache_scheme` declares (static FP8, by
{codes(KV_SCALE_STRATEGIES)}), else the model's. `--kv-dtype bfloat16` overrides the declaration. Scales come from the
checkpoint, one for all heads or one for each head. Their names under a layer's `self_attn`: {kv_scale_names()}.
If the checkpoint has no scales, the scale is 1, and values past ±448 become ±448. Scales are never measured. A draft's
KV cache has the scale 1 and the target's dtype, unless `--draft-kv-dtype` sets another. The table of backends says
which of them take FP8. A GPU needs compute capability 8.9.

## Drafters

{drafters()}

Refused by name: {drafts_not_built()}.

The `markov_head_type` of a `dspark` draft may be any of {codes(MARKOV_HEAD_TYPES)}. `rnn` needs `sample_from_anchor`.

An `mtp` draft has 1 to {MAX_MODULES} layers (`num_nextn_predict_layers`), each of any kind that targets have. Its
config.json may say `mtp_form`: `chain` (each layer reads the one before it; the default) or `target` (all read the
target). Levels of the tree past the last layer use that layer again. The MTP layers of {not_built()} are refused.

## The tree

`steps` is 0 (plain decoding) to 256, `topk` 1 (a chain) to 256, `num_draft_tokens` 1 to
`1 + topk + (steps - 1)·topk²`. With `by_batch` each batch size may have a tree of its own; none is larger than the
configured one. `page_size` is 1 to {MAX_PAGE_SIZE}.

## Sampling parameters

All of them work with every drafter, greedy and sampled.

{sampling()}

A grammar cannot be combined with `ignore_eos` or `min_tokens`. It needs a tokenizer.

## Grammars

Kinds: {codes(KINDS)}. All of them work with every drafter and tree, greedy and sampled, with n > 1, prefix hits and
preemption.

### JSON schemas

Enforced by type. A schema without a type gets the one that its keywords are for. A keyword that is not here is refused
by name.

{schemas()}

Also {codes(COMBINATORS)}. No other keyword may stand beside one of them, except `type` beside `enum` and `const`.

- `$ref` refers to a place in the same schema. `allOf` has one schema.
- The schemas of `oneOf` must exclude each other: by type, or by the constant texts of a property that all of them
  require.
- Strings with `pattern`, `format`, `minLength` or `maxLength` have no characters that JSON escapes: no quotation marks,
  backslashes, newlines or other control characters. Strings without these have all characters.
- `pattern` is searched for, as JSON Schema says: a side without `^` or `$` is open. Its dialect is that of
  [regular expressions](server.md#regular-expressions). `pattern` does not stand beside `format`.
- `minLength` and `maxLength` beside `pattern` or `format` are exact if one part of it varies in length. If several do,
  they share the length, so some valid texts cannot come.
- Lengths of up to 1000 characters in a string cost about 20 ms a character to compile, once. Above, masks take
  long: with a large vocabulary such a schema is refused.
- `uniqueItems` is for items whose values can be listed (enums, constants, booleans, integers between bounds), with at
  most {MAX_ENUM_SIZE} possible arrays, or `maxItems` 1. Elsewhere leave it out (in pydantic, a list for a set) and drop
  equal items of the output.
- A schema is refused if a part of it has no finite value, because it always needs itself again.
- Integers have 64 bits. A number with a bound has at most six decimals.
- `multipleOf` is for integers: with two bounds, or with none and at most {MAX_MULTIPLE_OF}.
- `minProperties` above 1 needs named properties.
- Formats of strings: {codes(sorted(STRING_FORMATS))}. They are
  exact. A time has a zone and no second 60. `email` and `hostname` bound no
  length, because bounded parts take a second to compile. Beside `maxLength`, labels have at most 23 characters, host
  names four labels, mail addresses two parts of 24 characters before `@`, two labels and a last one of 2 to 10 letters;
  a `uri` has `//`, and a path and a query of bounded length.
- Formats of integers: {codes(INTEGER_BOUNDS)}, as bounds.
- Formats without effect: {annotating()}.
- Without effect: {codes(sorted(ANNOTATION_KEYWORDS))}, and `uniqueItems` false.

## Refused in a config.json

A field that changes the computation is refused, unless it has a value that changes nothing or the family supports it:

{neutral()}

Other models with recurrent state (Jamba and RWKV among them) are refused by name.
"""


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    print(f"wrote {PAGE}")
