"""GGUF files made by hand from the format's description, of tiny checkpoints or of random blocks.

No library is needed, and nothing here uses the engine's reader, so that a wrong reading cannot agree with itself.
"""

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from espalier.kernels.layers.blocks import BLOCK_TYPES, BlockMatrix, dequantise_blocks

# Where a block has float16 numbers.
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
# Standard deviation of the integers times the small scales of a block.
SPREADS = {"Q4_0": 5, "Q4_1": 5, "Q5_0": 9, "Q5_1": 9, "Q8_0": 74, "Q4_K": 300, "Q5_K": 600, "Q6_K": 1400}
# By name: number and dtype of plain types.
PLAIN = {"F32": (0, torch.float32), "F16": (1, torch.float16), "BF16": (30, torch.bfloat16)}
ALIGNMENT = 32


class Stored(NamedTuple):
    """shape: rows first; type: its number; content: bytes."""

    shape: tuple[int, ...]
    type: int
    content: bytes


def blocks_of(name: str, rows: int, columns: int, seed: int = 0, size: float = 1.0) -> Tensor:
    """Random bytes [rows, row bytes], whose values are numbers of about `size`."""
    kind, generator = BLOCK_TYPES[name], torch.Generator().manual_seed(seed)
    count = rows * columns // kind.block_values
    blocks = torch.randint(0, 256, (count, kind.block_bytes), generator=generator).to(torch.uint8)
    for at in HALVES.get(name, (0,)):
        numbers = ((torch.rand(count, generator=generator) + 0.5) * size / SPREADS[name]).half()
        blocks[:, at : at + 2] = numbers[:, None].view(torch.uint8)
    return blocks.reshape(rows, -1)


def plain(tensor: Tensor, name: str = "F32") -> Stored:
    number, dtype = PLAIN[name]
    return Stored(tuple(tensor.shape), number, tensor.to(dtype).contiguous().view(torch.uint8).numpy().tobytes())


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Stored], version: int = 3) -> Path:
    """Values of `metadata` are written as uint32, float32, bool, string, or arrays of one of these."""
    header = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(metadata))]
    header += [part for key, value in metadata.items() for part in (_string(key), _value(value))]
    data = b""
    for name, stored in tensors.items():
        data += bytes(-len(data) % ALIGNMENT)
        shape = struct.pack(f"<I{len(stored.shape)}Q", len(stored.shape), *stored.shape[::-1])
        header += [_string(name), shape, struct.pack("<IQ", stored.type, len(data))]
        data += stored.content
    begin = b"".join(header)
    path.write_bytes(begin + bytes(-len(begin) % ALIGNMENT) + data)
    return path


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    kind, content = _typed(value)
    return struct.pack("<I", kind) + content


def _typed(value: Any) -> tuple[int, bytes]:
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):
        return (4, struct.pack("<I", value)) if value >= 0 else (5, struct.pack("<i", value))
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, str):
        return 8, _string(value)
    typed = [_typed(each) for each in value]
    return 9, struct.pack("<IQ", typed[0][0] if typed else 4, len(typed)) + b"".join(content for _, content in typed)


# As llama.cpp's converter names the parts of a layer.
LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA_LAYER = {
    **LAYER,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
MODEL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "gemma3_text": "gemma3"}


def name_of(name: str, is_gemma: bool) -> str:
    module, _, kind = name.rpartition(".")
    if module in MODEL:
        return f"{MODEL[module]}.{kind}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{(GEMMA_LAYER if is_gemma else LAYER)[part]}.{kind}"


def metadata_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """As the converter writes it."""
    name = ARCHITECTURES[config["model_type"]]
    rope = config.get("rope_parameters") or {}
    fields = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(rope.get("full_attention", rope).get("rope_theta", 10000.0)),
    }
    if name == "llama":
        fields["rope.dimension_count"] = config["head_dim"]
    elif name != "qwen2":
        fields |= {"attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"]}
    for theirs, ours in (
        ("sliding_window", "attention.sliding_window"),
        ("attn_logit_softcapping", "attn_logit_softcapping"),
        ("final_logit_softcapping", "final_logit_softcapping"),
    ):
        if "gemma" in name and config.get(theirs) is not None:
            fields[ours] = config[theirs]
    if name == "gemma3":
        fields |= {"attention.sliding_window_pattern": 2, "rope.freq_base_swa": rope["sliding_attention"]["rope_theta"]}
    described = {f"{name}.{key}": value for key, value in fields.items()}
    if config.get("eos_token_id") is not None:
        described["tokenizer.ggml.eos_token_id"] = config["eos_token_id"]
    return {"general.architecture": name, "general.alignment": ALIGNMENT, **described}


TypeOf = Callable[[str], str]


def convert(
    path: Path, out: Path, type_of: TypeOf = lambda name: "F32", extra: Mapping[str, Any] | None = None, files: int = 1
) -> dict[str, Tensor]:
    """Write the checkpoint in a directory to the GGUF file `out`; returns what it means, dense, float64.

    type_of: of each matrix, by its name in GGUF.  One in blocks gets random values.  extra: further metadata.
    files: of one model, named as llama.cpp names them.
    """
    config = json.loads((path / "config.json").read_text())
    is_gemma, tensors, meant = "gemma" in config["model_type"], dict[str, Stored](), dict[str, Tensor]()
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    if config["model_type"] != "llama":
        heads = {}
    for number, (name, tensor) in enumerate(load_file(path / "model.safetensors").items()):
        stored = name_of(name, is_gemma)
        pairs = heads.get(stored.split(".")[-2])
        kind = type_of(stored) if tensor.ndim == 2 else "F32"
        if kind in PLAIN:
            tensor = tensor.to(PLAIN[kind][1])
            rows = tensor + 1 if is_gemma and stored.endswith("norm.weight") else tensor
            tensors[stored], meant[name] = (
                plain(rows if pairs is None else in_pairs(rows, pairs), kind),
                tensor.double(),
            )
            continue
        blocks = blocks_of(kind, *tensor.shape, seed=number, size=float(tensor.std()))
        tensors[stored] = Stored(tuple(tensor.shape), BLOCK_TYPES[kind].gguf_type, blocks.numpy().tobytes())
        values = dequantise_blocks(BlockMatrix(BLOCK_TYPES[kind], blocks)).double()
        meant[name] = values if pairs is None else out_of_pairs(values, pairs)
    if config.get("tie_word_embeddings"):
        meant.pop("lm_head.weight", None)
        tensors.pop("output.weight", None)
    metadata = metadata_of(config) | dict(extra or {})
    _write_files(out, metadata, tensors, files)
    return meant


def _write_files(out: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Stored], files: int) -> None:
    if files == 1:
        write_gguf(out, metadata, tensors)
        return
    names: Sequence[str] = list(tensors)
    for i in range(files):
        own = {name: tensors[name] for name in names[i::files]}
        split = {"split.no": i, "split.count": files, "split.tensors.count": len(tensors)}
        name = f"{out.stem}-{i + 1:05}-of-{files:05}.gguf"
        write_gguf(out.with_name(name), {**(metadata if i == 0 else {}), **split}, own)


def in_pairs(rows: Tensor, heads: int) -> Tensor:
    """As llama.cpp's converter orders rows of q and k: the two values of a rotated pair become neighbours."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def out_of_pairs(rows: Tensor, heads: int) -> Tensor:
    order = in_pairs(torch.arange(len(rows))[:, None], heads)[:, 0]
    back = torch.empty_like(rows)
    back[order] = rows
    return back
