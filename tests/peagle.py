"""Random checkpoints of P-EAGLE heads in vLLM's form, each for a random target."""

from functools import lru_cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.builders import make_eagle3, make_target
from tests.folders import new_folder

LAYERS, MASK = 2, 3


@lru_cache
def peagle_directories(family: str, vocab: int = 16, draft_vocab: int | None = 13) -> tuple[Path, Path]:
    """(target, draft), made once a process.  family: as make_target takes it."""
    root = new_folder("peagle-")
    target = make_target(root / "target", family, seed=70, vocab=vocab)
    draft = make_eagle3(
        root / "draft", target, seed=71, draft_vocab=draft_vocab, num_hidden_layers=LAYERS, pard_token=MASK
    )
    weights = load_file(draft / "model.safetensors")
    save_file(weights | _of_peagle(weights), draft / "model.safetensors")
    return target, draft


def _of_peagle(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that an EAGLE-3 head does not have."""
    generator = torch.Generator().manual_seed(72)

    def drawn(like: Tensor, columns: int) -> Tensor:
        noise = torch.randn(*like.shape[:-1], columns, generator=generator, dtype=torch.float64)
        return 1 + 0.2 * noise if like.ndim == 1 else 1.2 * noise / columns**0.5

    hidden, inputs = weights["fc.weight"].shape
    made = {"mask_hidden": drawn(torch.empty(1, 1, 0), inputs) * inputs**0.5}
    first = {
        name: value for name, value in weights.items() if name.startswith("midlayer.") and "hidden_norm" not in name
    }
    for layer in range(1, LAYERS):
        for name, value in first.items():
            columns = (
                hidden if value.ndim == 2 and value.shape[1] == 2 * hidden and "down" not in name else value.shape[-1]
            )
            made[name.replace("midlayer.", f"layers.{layer}.")] = drawn(value, columns)
    return made
