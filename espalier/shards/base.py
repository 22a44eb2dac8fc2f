"""The parts of a model that ranks hold, and the interface of the operations that join the ranks' results.

A rank is a process that holds a part of every layer.  All ranks run the same launches.  The code that loads a weight
declares the rank's part: it passes a `RankPart` instead of a number of rows or columns.
"""

from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from espalier.errors import EspalierError


@dataclass(frozen=True)
class RankPart:
    """One rank's part of a dimension with `size` entries: the entries with indices begin .. end-1."""

    begin: int
    end: int
    size: int

    def __len__(self) -> int:
        return self.end - self.begin

    @property
    def is_whole(self) -> bool:
        return len(self) == self.size

    @property
    def slice(self) -> slice:
        return slice(self.begin, self.end)

    def scaled(self, entries: int) -> "RankPart":
        """Returns the same part of a dimension in which each entry is stored as `entries` entries."""
        return RankPart(self.begin * entries, self.end * entries, self.size * entries)

    def in_blocks_of(self, unit: int) -> "RankPart":
        """Returns the same part of a dimension in which `unit` entries are stored as one block.

        The last block may be smaller.  Raises EspalierError for a part that begins or ends inside a block."""
        if self.begin % unit or (self.end % unit and self.end != self.size):
            raise EspalierError(
                f"entries {self.begin} to {self.end - 1} of {self.size} cannot be cut out, because {unit} are stored "
                "as one; use a smaller tensor_parallel, or another checkpoint"
            )
        return RankPart(self.begin // unit, -(-self.end // unit), -(-self.size // unit))


# Describes the rows or columns of a weight that a rank loads: a RankPart, or their number if every rank loads all.
SizeOrPart = int | RankPart


def whole_part(size: int) -> RankPart:
    """Returns the RankPart with all entries, for a tensor of which every rank has a copy."""
    return RankPart(0, size, size)


def as_rank_part(size: SizeOrPart) -> RankPart:
    """Returns the RankPart of a size; for an int, the part with all entries."""
    return size if isinstance(size, RankPart) else RankPart(0, size, size)


class Collectives(Protocol):
    """Operations over the tensors of all ranks.  All ranks call the same operations in the same order, with equal
    shapes.

    The results have the same bits on every rank.  Classes with faster kernels override the last two operations."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Gather each rank's x [...] into [ranks, ...], in the order of the ranks."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum x over the ranks.  The sum may overwrite x."""
        ...

    def abort(self) -> None:
        """Ends an operation that waits for other ranks, with an error or a wrong result.  Called from another
        thread."""
        ...

    def all_reduce_add_norm(
        self, parts: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """Returns (total, RMS norm of total), [N, H] each, where total is residual + the sum of `parts` over the ranks.
        One kernel computes both.  Returns None if there is no such kernel; call `all_reduce` and a norm then.

        parts: [N, H], or partial sums [splits, N, H], which are added in order.  weight, eps: the norm's."""
        return None

    def gather_columns(self, x: Tensor, columns_per_rank: int, size: int) -> Tensor:
        """Joins the ranks' x [N, columns] side by side: [N, size].  The last ranks may have fewer columns."""
        padded = F.pad(x, (0, columns_per_rank - x.shape[1]))
        return self.all_gather(padded).transpose(0, 1).flatten(1)[:, :size].contiguous()


class IndivisibleError(EspalierError):
    """The number of ranks does not divide a size.  models/declared_weights.py adds the possible numbers to the text."""


@dataclass(frozen=True)
class Shards:
    """One rank's part of a model.  rank: the rank's number, from 0.  count: the number of ranks that divide the model.
    collectives: joins the tensors of the ranks; None for a single rank, and before the ranks are joined.

    All ranks have equal parts.  If `count` does not divide a size, the model is refused before its weights are read
    (models/declared_weights.py)."""

    rank: int = 0
    count: int = 1
    collectives: Collectives | None = None

    def part(self, size: int, size_name: str) -> RankPart:
        """Returns the rank's part of `size` entries.  size_name: names the size in the text of IndivisibleError."""
        if size % self.count:
            raise IndivisibleError(f"tensor_parallel={self.count} does not divide this model's {size_name} ({size})")
        part_size = size // self.count
        return RankPart(self.rank * part_size, (self.rank + 1) * part_size, size)

    def heads_part(self, num_heads: int) -> RankPart:
        """Returns the rank's attention heads.  Raises IndivisibleError."""
        return self.part(num_heads, "number of attention heads")

    def kv_heads_part(self, num_kv_heads: int) -> RankPart:
        """Returns the rank's K/V heads: a part, or one head that several ranks share.  Raises IndivisibleError."""
        if self.count % num_kv_heads:
            return self.part(num_kv_heads, "number of K/V heads")
        head = self.rank * num_kv_heads // self.count
        return RankPart(head, head + 1, num_kv_heads)

    def vocab_part(self, vocab_size: int) -> RankPart:
        """Returns the rank's part of the vocabulary.  The parts of the last ranks may be shorter, or empty."""
        begin, end = (
            min(rank * self.max_tokens_per_rank(vocab_size), vocab_size) for rank in (self.rank, self.rank + 1)
        )
        return RankPart(begin, end, vocab_size)

    def max_tokens_per_rank(self, vocab_size: int) -> int:
        """Returns the number of tokens in the longest part of the vocabulary."""
        return -(-vocab_size // self.count)

    def all_gather(self, x: Tensor) -> Tensor:
        """Gather each rank's x; see Collectives.all_gather."""
        return x[None] if self.collectives is None else self.collectives.all_gather(x)

    def gather_tokens(self, x: Tensor, vocab_size: int) -> Tensor:
        """Join the ranks' x [N, the rank's tokens] to [N, vocab_size]."""
        if self.collectives is None:
            return x
        return self.collectives.gather_columns(x, self.max_tokens_per_rank(vocab_size), vocab_size)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum x over the ranks; see Collectives.all_reduce."""
        return x if self.collectives is None else self.collectives.all_reduce(x)


# The shards of a single rank, which holds the whole model.
SINGLE_RANK = Shards()
