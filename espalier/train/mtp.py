"""Trains an MTP head of one or several layers for a frozen target, on given text and on the target's own text.

`espalier train mtp` runs `train_mtp`.  `evaluate_mtp` measures a head without the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.train.checkpoint import layer_fields
from espalier.train.data import Data
from espalier.train.draft_run import DraftRun, Loss, prepare_run, train_draft
from espalier.train.evaluate import AcceptReport, continued, print_reports, report, require_room
from espalier.train.llama import LlamaShape
from espalier.train.mtp_checkpoint import load_mtp, save_mtp
from espalier.train.mtp_head import MtpHead, mtp_loss
from espalier.train.settings import MtpConfig
from espalier.train.target import FrozenTarget, training_device


def new_head(target: FrozenTarget, config: MtpConfig) -> MtpHead:
    torch.manual_seed(config.seed)
    fields: dict[str, Any] = layer_fields(target.config, config.intermediate_size)
    head = MtpHead(LlamaShape(num_hidden_layers=config.layers, **fields), config.form).to(target.device)
    for layer in head.layers:
        layer.final_layernorm.weight.data.copy_(target.final_norm)
    return head


def train_mtp(target_dir: Path, data: Data, out: Path, work: Path, config: MtpConfig) -> dict[str, float]:
    """Train a head, save it to `out`, and return the run's figures."""
    files = prepare_run("mtp", target_dir, data, out, work, config)
    target = FrozenTarget(target_dir, training_device())
    head = new_head(target, config)
    longest = config.layers + 2
    loss = torch.compile(mtp_loss) if target.device.type == "cuda" else mtp_loss

    def measured(texts: list[np.ndarray], firsts: list[int]) -> dict[str, AcceptReport]:
        return {f"chain of {n}": measure_mtp(head, target, texts, firsts, n)[0] for n in (config.layers, longest)}

    parts = loss_of_batch(head, target, config, loss), lambda: save_mtp(head, target_dir, out)
    return train_draft(DraftRun(head, target, *parts, measured, files, config, depth=longest))


def loss_of_batch(
    head: MtpHead, target: FrozenTarget, config: MtpConfig, loss: Callable[..., tuple[Tensor, Tensor]] = mtp_loss
) -> Loss:
    return lambda embeds, hidden, logits, learned: loss(
        head, target.head, embeds, hidden, logits, learned, config.ttt_steps, config.decay
    )


@torch.no_grad()
def matches(head: MtpHead, target: FrozenTarget, tokens: Tensor, first: int, steps: int) -> Tensor:
    """Whether the head's most likely token at every depth equals the text's token, for every root n of a greedy text.

    tokens: [T].  Returns bool [steps, roots], for first <= n < T - steps.
    """
    roots = torch.arange(first, len(tokens) - steps, device=tokens.device)
    dtype, (hidden, _) = head.dtype, target(tokens[None])
    outputs = head.unroll(target.embed(tokens[None, 1:]).to(dtype), hidden[:, :-1].to(dtype), steps)
    found = [
        F.linear(output[0, roots - 1], target.head.to(dtype)).argmax(-1) == tokens[roots + depth]
        for depth, output in enumerate(outputs, 1)
    ]
    return torch.stack(found)


def measure_mtp(
    head: MtpHead, target: FrozenTarget, texts: list[np.ndarray], firsts: list[int], steps: int
) -> tuple[AcceptReport, list[float]]:
    """(accept lengths of chains of `steps` tokens, top-1 agreement by depth), over the target's greedy texts."""
    tokens = [torch.from_numpy(t.astype(np.int64)).to(target.device) for t in texts]
    found = [matches(head, target, t, f, steps) for t, f in zip(tokens, firsts, strict=True)]
    lengths = [1 + m.cumprod(0).sum(0) for m in found]
    return report(lengths, texts, firsts), torch.cat(found, 1).float().mean(1).tolist()


def evaluate_mtp(
    draft_dir: Path, target_dir: Path, prompts: list[list[int]], num_tokens: int
) -> dict[int, AcceptReport]:
    """Measure chains with as many steps as the head has layers, and with two more.  Returns reports by steps."""
    head = load_mtp(draft_dir)
    layers = head.shape.num_hidden_layers
    require_room(num_tokens, layers + 2)
    texts, firsts = continued(target_dir, prompts, num_tokens, layers + 2)
    target = FrozenTarget(target_dir, training_device())
    head = head.to(target.device, target.head.dtype)
    found = {steps: measure_mtp(head, target, texts, firsts, steps) for steps in (layers, layers + 2)}
    print_reports([("chain", steps, 1, steps + 1, accept) for steps, (accept, _) in found.items()])
    depths = " ".join(f"{agreement:.3f}" for agreement in found[layers + 2][1])
    print(f"share of the head's most likely tokens that are the target's, by depth: {depths}")
    return {steps: accept for steps, (accept, _) in found.items()}
