"""Any mixture of formats means what its parts mean: target and draft, layers left out, heads in the format or not.

A draft or MTP layers may be stored otherwise than their target.  A layer may be left out by name, or only by what the
file holds.  Each drawn mixture computes what its dequantised weights compute, and names a weight that is missing or
that nothing takes.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from espalier.errors import EspalierError
from espalier.kernels.layers.blocks import BLOCK_TYPES
from tests.builders import make_eagle3, make_target
from tests.checkpoints import edit_config, load_pair
from tests.folders import new_folder
from tests.gguf import convert
from tests.harness import CPU, DTYPE
from tests.mtp import mtp_directories
from tests.oracles.dense import DensePass
from tests.quantised import KINDS

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
POSITIONS = torch.arange(TOKENS.shape[1])[None]
DENSE, GGUF = "dense", "gguf"
# No quantiser touches these unless it names them, so only compressed-tensors' targets are drawn for them.
NEVER = ("embed", "norm", "d2t", "t2d")
# Where the names of dense modules stand in each quantization_config.
SKIPPED = {"compressed-tensors": "ignore", "modelopt": "exclude_modules"}
BLOCKS_OF_32 = [name for name, kind in BLOCK_TYPES.items() if kind.block_values == 32]


@dataclass(frozen=True)
class RankPart:
    """How a target or a draft is stored.

    kind: of KINDS, "dense", or "gguf" for a target.  left_out: a number for each matrix, which is dense if it is below
    `share`.  is_named: whether config.json names those.  has_head: whether the head is in the format too.
    """

    kind: str
    seed: int
    share: float
    is_named: bool
    has_head: bool

    def is_left_out(self, name: str) -> bool:
        if name.endswith("lm_head.weight"):
            return not self.has_head
        generator = torch.Generator().manual_seed(self.seed * 1000 + sum(map(ord, name)))
        return bool(torch.rand(1, generator=generator) < self.share)


def parts(kinds: tuple[str, ...]) -> st.SearchStrategy[RankPart]:
    shares = st.sampled_from((0.0, 0.3, 0.7))
    return st.builds(RankPart, st.sampled_from(kinds), st.integers(0, 99), shares, st.booleans(), st.booleans())


@cache
def directories(drafted: str) -> tuple[Path, Path]:
    """(target, draft) in float64; the draft is in the target's directory for MTP layers of its own."""
    if drafted == "own mtp":
        path = mtp_directories("mimo", 1)[0]
        return path, path
    if drafted == "mtp":
        return mtp_directories("llama", 1)
    root = new_folder("mixed-")
    target = make_target(root / "target", "llama", layers=4)
    return target, make_eagle3(root / "draft", target, own_head=True)


def store(path: Path, part: RankPart) -> Path:
    """Rewrite a directory as `part` says; returns a copy of it with what it means, dense."""
    meant = shutil.copytree(path, path.with_name(f"{path.name}-meant"))
    if part.kind == DENSE:
        return meant
    config, make = KINDS[part.kind]
    stored, values, skipped = dict[str, Tensor](), dict[str, Tensor](), []
    for name, tensor in load_file(path / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if tensor.ndim != 2 or any(never in name for never in NEVER):
            stored[name] = values[name] = tensor
        elif part.is_left_out(name):
            stored[name] = values[name] = tensor
            skipped.append(module)
        else:
            made, values[name] = make(tensor)
            stored |= {f"{module}.{suffix}": each for suffix, each in made.items()}
    save_file(stored, path / "model.safetensors")
    save_file(values, meant / "model.safetensors")
    edit_config(path, quantization_config=quantisation_of(config, skipped if part.is_named else [], part.has_head))
    return meant


def quantisation_of(config: Mapping[str, Any], skipped: list[str], has_head: bool) -> dict[str, Any]:
    field = SKIPPED.get(config["quant_method"], "modules_to_not_convert")
    # Whole names: the formats match parts of names too.
    names = [f"re:{name.replace('.', '[.]')}$" for name in skipped] if field != "exclude_modules" else skipped
    return {**config, "ignored_layers": [], field: names, "lm_head": has_head}


def store_gguf(path: Path, part: RankPart) -> Path:
    """As `store`, a GGUF file in the directory's place, with a block format for each matrix."""

    def type_of(name: str) -> str:
        named = "lm_head.weight" if name == "output.weight" else name
        if part.is_left_out(named):
            return "F32"
        return BLOCKS_OF_32[(part.seed + sum(map(ord, name))) % len(BLOCKS_OF_32)]

    meant = path.with_name(f"{path.name}-meant")
    shutil.copytree(path, meant)
    save_file(convert(path, path.with_name("target.gguf"), type_of), meant / "model.safetensors")
    return meant


def load(target_path: Path, draft_path: Path) -> tuple[Any, Any]:
    how: dict[str, Any] = {"dtype": DTYPE, "device": CPU, "position_rows": 64}
    return load_pair(target_path, draft_path, **how)


def outputs(target: Any, draft: Any) -> tuple[Tensor, Tensor]:
    """Logits of the target, and of the draft after it."""
    out, p = target(DensePass(TOKENS, target.layer_specs, POSITIONS)), DensePass(TOKENS, draft.layer_specs, POSITIONS)
    module = draft.modules[0]
    read = draft.fuse(out.captured) if draft.spec.target_output == "captured" else out.hidden
    return target.logits(out.hidden), module.logits(module(p, read))


def mixture(drafted: str, of_target: RankPart, of_draft: RankPart) -> tuple[tuple[Path, Path], tuple[Path, Path]]:
    """(target, draft) as they are stored, and as they are meant."""
    root, (target, draft) = new_folder("mixture-"), directories(drafted)
    own = shutil.copytree(target, root / "target")
    meant = store_gguf(own, of_target) if of_target.kind == GGUF else store(own, of_target)
    path = root / "target.gguf" if of_target.kind == GGUF else own
    if drafted == "own mtp":
        return (path, path), (meant, meant)
    other = shutil.copytree(draft, root / "draft")
    return (path, other), (meant, store(other, of_draft))


# Each loads eight models.
@settings(max_examples=settings.default.max_examples // 6)
@given(
    st.sampled_from(("eagle3", "mtp", "own mtp")),
    parts((*KINDS, DENSE, GGUF)),
    parts((*KINDS, DENSE)),
    st.integers(0, 10**6),
)
def test_a_mixture_computes_what_its_dequantised_weights_compute(
    drafted: str, of_target: RankPart, of_draft: RankPart, chosen: int
) -> None:
    if drafted == "own mtp" and of_target.kind == GGUF:
        of_target = RankPart(DENSE, 0, 0.0, True, False)
    stored, meant = mixture(drafted, of_target, of_draft)
    for found, expected in zip(outputs(*load(*stored)), outputs(*load(*meant)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    for path in {*stored}:
        if path.is_dir():
            names_what_is_wrong(path, lambda: load(*stored), chosen)


def names_what_is_wrong(path: Path, call: Callable[[], object], chosen: int) -> None:
    """Without one of its tensors, or with one more.  A draft without an embedding or a head takes its target's."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    borrowed = ("lm_head.weight", "embed_tokens.weight") if path.name == "draft" else ()
    needed = sorted(tensors.keys() - {*borrowed})
    name = needed[chosen % len(needed)]
    save_file({each: tensor for each, tensor in tensors.items() if each != name}, file)
    with pytest.raises(EspalierError) as caught:
        call()
        pytest.fail(f"{name} is missed by none")
    # By a norm of its own the reader knows how an EAGLE head calls its layers, so it misses those.
    if name != "midlayer.hidden_norm.weight":
        module = name.rpartition(".")[0]
        assert name in str(caught.value) or module in str(caught.value), (name, str(caught.value))
    save_file({**tensors, "layers.0.self_attn.odd_proj.weight": torch.ones(2, 2)}, file)
    with pytest.raises(EspalierError, match=r"odd_proj"):
        call()
    save_file(tensors, file)
