"""Pre-train the bundled target: packed windows, Muon and AdamW, bfloat16 compute over float32 weights.

`pretrain` may be interrupted; it resumes from the last saved step.  `bits_per_byte` measures a model on held-out files.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from espalier.train.llama import LlamaShape
from espalier.train.optim import learning_rate_factor, make_optimizers, set_learning_rate
from espalier.train.state import SavedState
from espalier.train.windows import StreamWindows
from lab.bundle.llama import Llama, save_llama

LossFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class PretrainConfig:
    num_tokens: float = 2.1e9
    length: int = 2048
    batch: int = 64
    matrix_lr: float = 4e-3
    other_lr: float = 3e-3
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    log_every: int = 50
    save_every: int = 1000


@torch.no_grad()
def bits_per_byte(
    loss_of: LossFunction, stream: np.ndarray, num_bytes: int, device: torch.device, length: int = 2048
) -> float:
    """Bits per byte of a stream of token ids whose text has num_bytes bytes.

    Windows overlap by half.  Only the later half of each window counts, so that every token has context.
    loss_of: (tokens [B, T], targets [B, T]) -> loss in nats [B, T].
    """
    half = length // 2
    ids = torch.from_numpy(stream.astype(np.int64)).to(device)
    starts = torch.arange(0, len(stream) - length - 1, half, device=device)
    total, counted = 0.0, 0
    for chunk in starts.split(32):
        windows = ids[chunk[:, None] + torch.arange(length + 1, device=device)]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            nats = loss_of(windows[:, :-1], windows[:, 1:])
        counts = torch.arange(length, device=device) >= half
        mask = counts | (chunk == 0)[:, None]
        total += float((nats * mask).sum())
        counted += int(mask.sum())
    return total / math.log(2) / (num_bytes * counted / len(stream))


def join_ranks() -> tuple[torch.device, int, int]:
    """(device, rank, number of ranks).  Without torchrun there is one rank."""
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if not torch.cuda.is_available():
        return torch.device("cpu"), rank, num_ranks
    torch.cuda.set_device(rank % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device()), rank, num_ranks


def fast_attention_context(device: torch.device) -> AbstractContextManager[None]:
    """A context that selects cuDNN's attention on Hopper, where it takes a quarter of the time of PyTorch's choice,
    FlashAttention-2."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9:
        return sdpa_kernel(SDPBackend.CUDNN_ATTENTION)
    return nullcontext()


def average_gradients(model: Llama) -> None:
    """Average the gradients over all ranks."""
    if not dist.is_initialized():
        return
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def train_step(
    loss_of: LossFunction, batch: Tensor, model: Llama, optimizers: list[torch.optim.Optimizer], clip: float
) -> Tensor:
    with torch.autocast(batch.device.type, torch.bfloat16, enabled=batch.is_cuda):
        loss = loss_of(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()).mean()
    loss.backward()
    average_gradients(model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.detach()


@dataclass(frozen=True)
class Heldout:
    """Held-out token ids, and the number of bytes of their text."""

    stream: np.ndarray
    num_bytes: int

    def first_part(self, divisor: int) -> Heldout:
        stream = self.stream[: len(self.stream) // divisor]
        return Heldout(stream, self.num_bytes * len(stream) // len(self.stream))


def pretrain(
    packed: Path, out: Path, work: Path, eos_token_ids: list[int], config: PretrainConfig, shape: LlamaShape
) -> float:
    """Train, save to `out`, and return the held-out bits per byte.  work: the folder of an unfinished run's state."""
    device, rank, num_ranks = join_ranks()
    torch.manual_seed(config.seed)
    work.mkdir(parents=True, exist_ok=True)
    windows = StreamWindows(np.load(packed / "train.npy"), config.length, device, config.seed)
    heldout = Heldout(np.load(packed / "heldout.npy"), int((packed / "heldout_bytes.txt").read_text()))
    model = Llama(shape, torch.bfloat16 if device.type == "cuda" else torch.float32).to(device)
    loss_of: LossFunction = torch.compile(model) if device.type == "cuda" else model
    with fast_attention_context(device):
        made_from = {name: str(value) for name, value in {**vars(config), **vars(shape)}.items()}
        state = SavedState(work / "base.pt", made_from)
        run_steps(model, loss_of, windows, heldout.first_part(8), state, config, rank, num_ranks)
        result = bits_per_byte(loss_of, heldout.stream, heldout.num_bytes, device)
    if rank == 0:
        save_llama(model, out, eos_token_ids)
        print(f"held-out {result:.4f} bits/byte over {heldout.num_bytes:,} bytes")
    return result


def run_steps(
    model: Llama,
    loss_of: LossFunction,
    windows: StreamWindows,
    heldout: Heldout,
    state: SavedState,
    config: PretrainConfig,
    rank: int,
    num_ranks: int,
) -> None:
    """Run the remaining steps.  Each rank takes its share of every batch; rank 0 reports and saves."""
    optimizers = make_optimizers(model, config.matrix_lr, config.other_lr, config.weight_decay)
    num_steps = max(1, int(config.num_tokens / (config.batch * config.length)))
    first = state.load(model, optimizers)
    num_parameters = sum(p.numel() for p in model.parameters())
    print(f"{num_parameters:,} parameters, {len(windows.stream):,} tokens, steps {first} to {num_steps}")
    begun, losses = time.perf_counter(), []
    for step, batch in zip(range(first, num_steps), windows.batches(config.batch, first), strict=False):
        set_learning_rate(optimizers, learning_rate_factor(step / num_steps))
        losses.append(train_step(loss_of, batch[rank::num_ranks], model, optimizers, config.clip))
        done = step + 1
        if rank == 0 and (done % config.log_every == 0 or done == num_steps):
            print_progress(
                done, num_steps, losses, config.batch * config.length * (done - first), time.perf_counter() - begun
            )
            losses.clear()
        if rank == 0 and done % config.save_every == 0:
            state.save(model, optimizers, done)
            part = bits_per_byte(loss_of, heldout.stream, heldout.num_bytes, windows.stream.device)
            print(f"held-out {part:.4f} bits/byte on a part")


def print_progress(step: int, num_steps: int, losses: list[Tensor], num_tokens: int, seconds: float) -> None:
    mean = float(torch.stack(losses).mean())
    rate = num_tokens / seconds / 1e6
    print(f"step {step}/{num_steps} loss {mean:.4f} {rate:.3f} M tokens/s {seconds:.0f} s", flush=True)
