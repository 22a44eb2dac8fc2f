"""The linear layers of a model as a list of shapes, and chains of them on a GPU to be timed.

A chain does not find its weights in the L2 cache, because each layer of a pass has its own weights.  A single shape is
measured over more copies than the cache holds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.errors import EspalierError

Shape = tuple[int, int]


@dataclass(frozen=True)
class Run:
    """`count` weights [out, in] of a pass, each multiplied with `rows` rows."""

    name: str
    shape: Shape
    count: int
    rows: int

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, at two bytes a number."""
        return 2 * self.count * self.shape[0] * self.shape[1]


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder's linear layers, and of a one-layer draft for it.

    draft_vocab: rows of the draft's lm_head; captured: number of target features that the draft fuses; draft: the
    draft's sizes, None if its layer is like the target's.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocab: int
    draft_vocab: int = 32000
    captured: int = 3
    draft: "ModelShape | None" = None

    def target_pass(self, rows: int, head_rows: int | None = None) -> tuple[Run, ...]:
        """A verify pass: every layer over `rows` rows, and the lm_head over `head_rows`, None: over all rows."""
        return (*self._layer("", self.hidden, self.layers, rows), self._head("lm_head", self.vocab, rows, head_rows))

    def draft_pass(self, rows: int, head_rows: int | None = None, fused_rows: int = 0) -> tuple[Run, ...]:
        """A draft level; with fused_rows > 0, an extend that fuses as many rows of captured features."""
        draft = self.draft or self
        fuse = Run("draft fc", (draft.hidden, self.captured * self.hidden), 1, fused_rows)
        layer = draft._layer("draft ", 2 * draft.hidden, 1, rows)
        head = draft._head("draft lm_head", self.draft_vocab, rows, head_rows)
        return (*((fuse,) if fused_rows else ()), *layer, head)

    def shapes(self) -> tuple[Shape, ...]:
        """Every weight shape once, in the order of a round."""
        runs = (*self.target_pass(1), *self.draft_pass(1, fused_rows=1))
        return tuple(dict.fromkeys(run.shape for run in runs))

    def _layer(self, prefix: str, wide: int, count: int, rows: int) -> tuple[Run, ...]:
        attention = self.heads * self.head_size
        return (
            Run(f"{prefix}qkv", (attention + 2 * self.kv_heads * self.head_size, wide), count, rows),
            Run(f"{prefix}o", (self.hidden, attention), count, rows),
            Run(f"{prefix}gate_up", (2 * self.intermediate, self.hidden), count, rows),
            Run(f"{prefix}down", (self.hidden, self.intermediate), count, rows),
        )

    def _head(self, name: str, vocab: int, rows: int, head_rows: int | None) -> Run:
        return Run(name, (vocab, self.hidden), 1, rows if head_rows is None else head_rows)


SHAPES = MappingProxyType(
    {
        "llama-3.1-8b": ModelShape(4096, 32, 32, 8, 128, 14336, 128256),
        "qwen3-8b": ModelShape(4096, 36, 32, 8, 128, 12288, 151936),
        "llama-3.2-1b": ModelShape(2048, 16, 32, 8, 64, 8192, 128256),
    }
)


def shape_named(name: str) -> ModelShape:
    if name not in SHAPES:
        raise EspalierError(f"no shape {name!r}; there are {', '.join(SHAPES)}")
    return SHAPES[name]


Multiply = Callable[[Tensor, Tensor], Tensor]


class Weights:
    """Random weights on a GPU, one for each layer.  Passes whose runs have the same name and shape share them."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._made: dict[tuple[str, Shape], list[Tensor]] = {}

    def of(self, run: Run) -> list[Tensor]:
        made = self._made.setdefault((run.name, run.shape), [])
        while len(made) < run.count:
            made.append(self.drawn(run.shape))
        return made[: run.count]

    def drawn(self, shape: Shape) -> Tensor:
        """A random weight as large as a trained one.  Zeros would be multiplied faster, with less power."""
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_(std=shape[1] ** -0.5)

    def chain(self, runs: Sequence[Run], multiply: Multiply) -> Callable[[], None]:
        """A function that runs all layers in the order of a pass: layer by layer, then the rest."""
        inputs = {(run.rows, run.shape[1]): self._input(run) for run in runs}
        order: list[tuple[Tensor, Tensor]] = []
        for group in _by_layer(runs):
            for layer in range(group[0].count):
                order += [(inputs[run.rows, run.shape[1]], self.of(run)[layer]) for run in group]

        def body() -> None:
            for x, weight in order:
                multiply(x, weight)

        return body

    def _input(self, run: Run) -> Tensor:
        return torch.randn(run.rows, run.shape[1], dtype=self.dtype, device=self.device)


def _by_layer(runs: Sequence[Run]) -> list[list[Run]]:
    """Neighbouring runs with the same count, grouped."""
    groups: list[list[Run]] = []
    for run in runs:
        if groups and groups[-1][0].count == run.count:
            groups[-1].append(run)
        else:
            groups.append([run])
    return groups


def plain(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)
