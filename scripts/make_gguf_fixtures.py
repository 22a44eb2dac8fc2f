"""Writes tests/fixtures/gguf/: a tiny model with its tokenizer, written and read back by the library that defines GGUF.

    python -m venv ggufs
    ggufs/bin/pip install gguf
    ggufs/bin/python scripts/make_gguf_fixtures.py

The matrices have every block format that is supported.  `expected.json` has the SHA-256 of each matrix as the library
dequantises it, float32, with the rows of q and k in the order of Hugging Face checkpoints.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

OUT = Path(__file__).parents[1] / "tests" / "fixtures" / "gguf"
HIDDEN, INNER, HEADS, SIZE = 256, 32, 2, 32
TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}<|assistant|>"
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld"]
SPECIAL = ["<|endoftext|>", "<|user|>", "<|assistant|>"]
TYPES = {
    "token_embd": "Q4_K",
    "blk.0.attn_q": "Q4_K",
    "blk.0.attn_k": "Q5_K",
    "blk.0.attn_v": "Q6_K",
    "blk.0.attn_output": "Q5_0",
    "blk.0.ffn_gate": "Q4_K",
    "blk.0.ffn_up": "Q4_K",
    "blk.0.ffn_down": "Q8_0",
    "blk.1.attn_q": "Q5_K",
    "blk.1.attn_k": "Q4_0",
    "blk.1.attn_v": "Q4_1",
    "blk.1.attn_output": "Q5_1",
    "blk.1.ffn_gate": "F16",
    "blk.1.ffn_up": "BF16",
    "blk.1.ffn_down": "F32",
}
# The library does not quantise these: their blocks are random bytes, but for the float16 numbers at these places.
HALVES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def main() -> None:
    random, tokens = np.random.default_rng(0), vocabulary()
    file = OUT / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    describe(writer, tokens)
    for name, kind in TYPES.items():
        part = name.rpartition(".")[2]
        rows, columns = {
            "token_embd": (len(tokens), HIDDEN),
            "attn_q": (HEADS * SIZE, HIDDEN),
            "attn_k": (SIZE, HIDDEN),
            "attn_v": (SIZE, HIDDEN),
            "attn_output": (HIDDEN, HEADS * SIZE),
            "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
        }[part]
        type = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(f"{name}.weight", stored(random, type, rows, columns), raw_dtype=type)
    for layer in range(2):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", random.normal(1, 0.1, HIDDEN).astype(np.float32))
    writer.add_tensor("output_norm.weight", random.normal(1, 0.1, HIDDEN).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (OUT / "expected.json").write_text(json.dumps(hashes(file), indent=1) + "\n")


def vocabulary() -> list[str]:
    """The byte alphabet of GPT-2, what the merges make, and special tokens."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    alphabet = [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]
    return [*alphabet, *(merge.replace(" ", "") for merge in MERGES), *SPECIAL]


def describe(writer: Any, tokens: list[str]) -> None:
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(SIZE)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    kinds = [gguf.TokenType.CONTROL if token in SPECIAL else gguf.TokenType.NORMAL for token in tokens]
    writer.add_token_types(kinds)
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(tokens.index(SPECIAL[0]))
    writer.add_eot_token_id(tokens.index(SPECIAL[1]))
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def stored(random: np.random.Generator, type: gguf.GGMLQuantizationType, rows: int, columns: int) -> NDArray[Any]:
    values = random.normal(0, 0.05, (rows, columns)).astype(np.float32)
    if type.name not in HALVES:
        return gguf.quantize(values, type)
    size, nbytes = gguf.GGML_QUANT_SIZES[type]
    blocks = random.integers(0, 256, (rows * columns // size, nbytes), dtype=np.uint8)
    for at in HALVES[type.name]:
        scales = random.uniform(0.5, 1.5, (len(blocks), 1)) * (1e-4 if type.name != "Q6_K" else 4e-5)
        blocks[:, at : at + 2] = scales.astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def hashes(file: Path) -> dict[str, str]:
    found = {}
    for tensor in gguf.GGUFReader(file).tensors:
        name, values = str(tensor.name), gguf.dequantize(np.array(tensor.data), tensor.tensor_type)
        heads = {"attn_q": HEADS, "attn_k": 1}.get(name.split(".")[-2])
        if heads is not None:
            values = values.reshape(heads, SIZE // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)
        found[name] = hashlib.sha256(np.ascontiguousarray(values, "<f4").tobytes()).hexdigest()
    return found


if __name__ == "__main__":
    main()
