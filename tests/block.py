"""Random checkpoints of block drafts in their publishers' forms, each for a random target."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.builders import make_target
from tests.folders import new_folder

# The target's layers are 0 to 2; the drafts read the inputs of layers 1 and 2.
LAYERS, CAPTURE = 2, (1, 2)
MASK, RANK, WINDOW = 3, 5, 4
TAPS, GROUP, SELECTED = 2, 8, 6
FORMS = ("dflash", "jetspec", "dspark", "speculators", "dflash2", "gated", "rnn")
# The kind of the Markov head of forms with one.
KINDS = {"dspark": "vanilla", "speculators": "vanilla", "gated": "gated", "rnn": "rnn"}
IN_SPECULATORS_FORM = ("speculators", "rnn")
# The projection of a Markov head: its name, rows, and columns but for those of the hidden state.
PROJECTIONS = {"gated": ("gate_proj", RANK, RANK), "rnn": ("joint_proj", 3 * RANK, 2 * RANK)}


@lru_cache
def block_directories(family: str, form: str, block_size: int, vocab: int = 16) -> tuple[Path, Path]:
    """(target, draft), made once a process.  family: as make_target takes it."""
    root = new_folder("block-")
    target = make_target(root / "target", family, seed=60, vocab=vocab)
    return target, make_block_draft(root / "draft", target, form, block_size)


def make_block_draft(path: Path, target_path: Path, form: str, block_size: int, seed: int = 61, **fields: Any) -> Path:
    """form: "dflash" and "jetspec" as z-lab stores them, "dspark" as DeepSpec does, "speculators": a dspark with a
    reduced vocabulary whose first layer slides and is causal, or "dflash2" as z-lab stores it; its first layer slides.
    "gated" is as dspark, and "rnn" as speculators, with another Markov head.  fields: of config.json, to be changed."""
    target = json.loads((target_path / "config.json").read_text())
    vocab, hidden = target["vocab_size"], target["hidden_size"]
    layer = {
        "model_type": "qwen3",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    ids = [layer_id - 1 for layer_id in CAPTURE]
    markov = {"markov_rank": RANK, "markov_head_type": KINDS.get(form)}
    draft_vocab = vocab - 4 if form in IN_SPECULATORS_FORM else vocab
    if form in ("dflash", "jetspec"):
        own = {"target_layer_ids": ids, "mask_token_id": MASK} | ({"causal_head": True} if form == "jetspec" else {})
        config = {**layer, "architectures": ["DFlashDraftModel"], "block_size": block_size, "dflash_config": own}
    elif form == "dflash2":
        own = {"target_layer_ids": ids, "mask_token_id": MASK, "block_size": block_size, "conv_kernel_size": TAPS}
        own |= {"conv_group_size": GROUP, "selector_rank": RANK, "selector_top_k": SELECTED, "output_multiplier": 0.7}
        own |= {"final_logit_softcapping": 6.0, "input_embedding_scale": 1.3}
        types = ["sliding_attention", *["full_attention"] * (LAYERS - 1)]
        slides = {"sliding_window": block_size, "use_sliding_window": True, "layer_types": types, "is_causal": False}
        config = {**layer, **slides, "architectures": ["DFlash2DraftModel"], "dflash_config": own}
    elif form not in IN_SPECULATORS_FORM:
        config = {**layer, **markov, "architectures": ["Qwen3DSparkModel"], "target_layer_ids": ids}
        config |= {"block_size": block_size, "mask_token_id": MASK, "enable_confidence_head": False}
    else:
        types = ["sliding_attention", *["full_attention"] * (LAYERS - 1)]
        slides = {"sliding_window": WINDOW, "use_sliding_window": True, "layer_types": types}
        config = {
            "architectures": ["DSparkSpeculator"],
            "speculators_model_type": "dspark",
            "speculators_config": {"algorithm": "dspark", "verifier": {"name_or_path": None}},
            "transformer_layer_config": {**layer, **slides},
            "aux_hidden_state_layer_ids": list(CAPTURE),
            "draft_vocab_size": draft_vocab,
            "block_size": block_size,
            "mask_token_id": MASK,
            **markov,
        }
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({**config, **fields}))
    save_file(_weights(form, vocab, draft_vocab, hidden, seed), path / "model.safetensors")
    return path


def _weights(form: str, vocab: int, draft_vocab: int, hidden: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def matrix(rows: int, columns: int) -> Tensor:
        return 1.5 * drawn(rows, columns) / columns**0.5

    weights = {"fc": matrix(hidden, len(CAPTURE) * hidden)}
    weights |= {name: 1 + 0.2 * drawn(hidden) for name in ("hidden_norm", "norm")}
    for i in range(LAYERS):
        sizes = {"q": (32, hidden), "k": (16, hidden), "v": (16, hidden), "o": (hidden, 32)}
        weights |= {f"layers.{i}.self_attn.{name}_proj": matrix(*size) for name, size in sizes.items()}
        weights |= {f"layers.{i}.self_attn.{name}_norm": 1 + 0.3 * drawn(8) for name in "qk"}
        weights |= {f"layers.{i}.mlp.{name}_proj": matrix(2 * hidden, hidden) for name in ("gate", "up")}
        weights[f"layers.{i}.mlp.down_proj"] = matrix(hidden, 2 * hidden)
        weights |= {f"layers.{i}.{n}_layernorm": 1 + 0.2 * drawn(hidden) for n in ("input", "post_attention")}
    if form in KINDS:
        weights |= {"markov_head.markov_w1": drawn(vocab, RANK), "markov_head.markov_w2": matrix(draft_vocab, RANK)}
    if form in KINDS and form not in IN_SPECULATORS_FORM:
        weights |= {"embed_tokens": drawn(vocab, hidden), "lm_head": matrix(vocab, hidden)}
    if form == "dflash2":
        sublayers = [f"layers.{i}.{name}_conv" for i in range(LAYERS) for name in ("attention", "mlp")]
        weights |= {f"{name}.kernel_projection": matrix(2 * TAPS * hidden // GROUP, hidden) / 2 for name in sublayers}
        weights["candidate_selector.hidden_projection"] = matrix(RANK, hidden)
    named = {f"{name}.weight": value for name, value in weights.items()}
    if form == "dflash2":
        named |= {f"{name}.base_kernel": drawn(2, TAPS, hidden) / 2 for name in sublayers}
        named |= {f"candidate_selector.{n}_codebook": drawn(vocab, RANK) for n in ("predecessor", "successor")}
    if form in PROJECTIONS:
        name, rows, columns = PROJECTIONS[form]
        named[f"markov_head.{name}.weight"] = 2 * matrix(rows, columns + hidden)
        named[f"markov_head.{name}.bias"] = drawn(rows)
    if draft_vocab != vocab:
        ids = torch.arange(draft_vocab) + torch.arange(draft_vocab).clamp(max=vocab - draft_vocab)
        known = torch.zeros(vocab, dtype=torch.bool)
        known[ids] = True
        named |= {"lm_head.weight": matrix(draft_vocab, hidden), "d2t": ids - torch.arange(draft_vocab), "t2d": known}
    return named
