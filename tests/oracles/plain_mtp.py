"""One multi-token prediction module, from section 2.2 of DeepSeek-V3's paper (arXiv:2412.19437) and the stored tensors.

Only the decoder layer is the engine's own; tests/models compares it with transformers'."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from espalier.attention import Pass
from espalier.models import CausalLM
from espalier.models.draft import DraftOutput
from espalier.models.layers.residual import Residual
from espalier.models.mtp import MTPDraft, MTPModule
from tests.mtp import LAYERS, NAMED, NEXTN_LAYERS, SHARED


@dataclass(frozen=True)
class PlainModule:
    """Equations 21 to 23: h' = M · cat(norm(embedding), norm(hidden)), a decoder layer, a norm, the target's head.

    What the next rows read is the normed output.  hidden_before_embedding: the other order in the columns of M.
    norm_offset: what norms are stored without."""

    module: MTPModule
    embedding: Tensor
    head: Tensor
    weights: dict[str, Tensor]
    eps: float
    hidden_before_embedding: bool
    norm_offset: float

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * (self.norm_offset + self.weights[name])

    def joined(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """[B, Q, H]: what the decoder layer gets (equation 21)."""
        halves = [self.norm(self.embedding[tokens], "embed_norm"), self.norm(hidden, "hidden_norm")]
        if self.hidden_before_embedding:
            halves.reverse()
        return torch.cat(halves, -1) @ self.weights["project"].T

    def __call__(self, p: Pass, hidden: Tensor, parents: Tensor | None = None) -> DraftOutput:
        assert parents is None
        s = Residual(self.joined(p.tokens, hidden).flatten(0, 1))
        self.module.layer(s, p)
        assert isinstance(s.delta, Tensor)
        x = s.x + (s.delta if s.delta.ndim == 2 else s.delta.sum(0))
        normed = self.norm(x, "norm").unflatten(0, p.tokens.shape)
        return DraftOutput(normed, normed)

    def output_from_hidden(self, hidden: Tensor) -> DraftOutput:
        return DraftOutput(hidden, hidden)

    def logits(self, out: DraftOutput) -> Tensor:
        return out.normed @ self.head.T


def plain_modules(target_path: Path, draft_path: Path, target: CausalLM, draft: MTPDraft) -> list[PlainModule]:
    """The modules of a checkpoint of tests/mtp.py."""
    of_target, stored = (load_file(path / "model.safetensors") for path in (target_path, draft_path))
    is_mimo = target.config.architecture == "MiMoForCausalLM"
    plain = []
    for i, module in enumerate(draft.modules):
        prefix, names = f"model.layers.{LAYERS + i}.", NEXTN_LAYERS
        if draft_path != target_path or is_mimo:
            prefix, names = f"{'model.' if is_mimo else ''}mtp_layers.{i}.", NAMED
        if draft_path == target_path and "mtp.fc.weight" in stored:
            prefix, names = "mtp.", SHARED
        weights = {name: stored[f"{prefix}{last}.weight"] for name, last in names.items()}
        offset = target.config.family.norm_offset
        embedding, head = (of_target[f"{name}.weight"] for name in ("model.embed_tokens", "lm_head"))
        plain.append(PlainModule(module, embedding, head, weights, target.config.rms_norm_eps, is_mimo, offset))
    return plain
