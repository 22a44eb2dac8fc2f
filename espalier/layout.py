"""Every size of a round, derived once from the configuration.

Nothing else in the house multiplies two of these numbers: buffers are allocated from a RoundLayout and launchers check
their arguments against it, on the host, without touching the device.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import TypeVar

from torch import Tensor

from espalier.errors import EspalierError

ANCESTOR_BITS = 64
MAX_PAGE_SIZE = 512
MIN_CHUNK_WIDTH = 16
ROUNDS_IN_FLIGHT = 2
# Log-probabilities of a prompt: logits of the vocabulary that are there at once, in bytes of float32.  At 128k tokens
# that is 256 rows, as many as take as long to multiply as the head's weight takes to read.
LOGITS_BYTES = 2**27
# The row of page buffers that takes what padding writes; it stays zero, so that a masked read of it is finite.
DUMMY_ROW = 0

Number = TypeVar("Number", int, Tensor)


def max_draft_tokens(steps: int, topk: int) -> int:
    """The most nodes a tree can have, root included: everything that `steps` levels of `topk` beams can propose."""
    return 1 + topk + (steps - 1) * topk**2 if steps else 1


def _refuse(*checks: tuple[bool, str, int, str]) -> None:
    """(whether it is wrong, the field, its value, what to use).  Raises EspalierError for the first that is."""
    for wrong, name, value, supported in checks:
        if wrong:
            raise EspalierError(f"{name}={value} is not supported; use {supported}")


@dataclass(frozen=True)
class TreeShape:
    """A tree: its depth, the branches kept at each level, the nodes verified a round, root included.

    Raises EspalierError for what no levels can propose.
    """

    steps: int
    topk: int
    num_draft_tokens: int

    def __post_init__(self) -> None:
        bound = max_draft_tokens(self.steps, self.topk)
        _refuse(
            (self.steps < 0, "steps", self.steps, "0 (plain decoding) or more"),
            (self.topk < 1, "topk", self.topk, "1 (a chain) or more"),
            (
                not 1 <= self.num_draft_tokens <= bound,
                "num_draft_tokens",
                self.num_draft_tokens,
                f"1 to {bound} at steps={self.steps}, topk={self.topk} (1 + topk + (steps - 1)·topk²; 1 at steps=0): "
                "lower it, or raise steps or topk",
            ),
        )

    def __str__(self) -> str:
        if not self.steps:
            return "plain decoding"
        return f"steps {self.steps}, topk {self.topk}, num_draft_tokens {self.num_draft_tokens}"

    def require(self, other: "TreeShape") -> None:
        """Check that buffers laid out for this tree hold another.  Raises EspalierError."""
        for name in TREE_FIELDS:
            asked, have = getattr(other, name), getattr(self, name)
            if asked > have:
                raise EspalierError(
                    f"{name}={asked} of a batch's own tree is above the configured {name}={have}, which buffers follow "
                    f"from; lower it, or raise {name}"
                )


TREE_FIELDS = tuple(f.name for f in fields(TreeShape))
PLAIN = TreeShape(steps=0, topk=1, num_draft_tokens=1)


def bucket_of(batch: int, buckets: Iterable[int]) -> int:
    """What a round of so many requests is padded to, of ascending buckets; above the largest it is not padded."""
    return next((bucket for bucket in buckets if bucket >= batch), batch)


def next_bucket(batch: int) -> int:
    """The smallest power of two, or middle between two of them, that is at least `batch`."""
    power = 1 << max(batch - 1, 0).bit_length()
    middle = power - power // 4
    return middle if power > 2 and middle >= batch else power


def logit_rows(vocab_size: int) -> int:
    """Rows of a prompt whose logits are made at once."""
    return max(1, LOGITS_BYTES // (4 * vocab_size))


@dataclass(frozen=True)
class RoundLayout:
    """Sizes of rounds and prefill passes.

    max_batch: requests a round can hold; steps, topk, num_draft_tokens: the tree (0, 1, 1: plain decoding);
    page_size: positions a page; max_context: prompt and output of one request, in tokens;
    reentry: rows of a prefix hit that are computed again, for the draft; chunk_size: rows of one prefill pass;
    trees: (n, shape), ascending: rounds of n requests or more have this shape, up to the next; fewer than the first
    have the configured tree;
    busy_chunk_size: rows of a prefill pass while running requests wait for it; None: chunk_size.
    Buffers follow from the configured tree, which is the largest.
    """

    max_batch: int
    steps: int
    topk: int
    num_draft_tokens: int
    page_size: int
    max_context: int
    reentry: int
    chunk_size: int
    trees: tuple[tuple[int, TreeShape], ...] = ()
    busy_chunk_size: int | None = None

    def __post_init__(self) -> None:
        configured = self.tree
        _refuse(
            (not 1 <= self.page_size <= MAX_PAGE_SIZE, "page_size", self.page_size, f"1 to {MAX_PAGE_SIZE}"),
            (self.max_batch < 1, "max_batch", self.max_batch, "1 or more"),
            (self.max_context < 2, "max_context", self.max_context, "2 or more: a prompt token and an answer"),
            (self.chunk_size < MIN_CHUNK_WIDTH, "chunk_size", self.chunk_size, f"{MIN_CHUNK_WIDTH} or more"),
            (
                not MIN_CHUNK_WIDTH <= (self.busy_chunk_size or self.chunk_size) <= self.chunk_size,
                "busy_chunk_size",
                self.busy_chunk_size or 0,
                f"{MIN_CHUNK_WIDTH} to {self.chunk_size} (chunk_size)",
            ),
        )
        for _, shape in self.trees:
            configured.require(shape)
        sizes = [batch for batch, _ in self.trees]
        if any(size <= before for before, size in zip([0, *sizes], sizes, strict=False)):
            raise EspalierError(f"batches {sizes} do not have trees of their own; use 1 or more, ascending")

    @property
    def tree(self) -> TreeShape:
        """The configured one."""
        return TreeShape(self.steps, self.topk, self.num_draft_tokens)

    def with_tree(self, shape: TreeShape) -> "RoundLayout":
        """The layout of rounds that have this shape, in buffers of this one.  Raises EspalierError where it is larger.

        Its tables and pages are those of this layout: only sizes of a launch are to be read of it.
        """
        self.tree.require(shape)
        return replace(self, **asdict(shape), trees=())

    def at(self, batch: int) -> "RoundLayout":
        """The layout of a round that is launched for so many requests, padding included."""
        shape = next((shape for least, shape in reversed(self.trees) if least <= batch), self.tree)
        return self if shape == self.tree else self.with_tree(shape)

    @property
    def fullest(self) -> tuple[tuple[int, "RoundLayout"], ...]:
        """The largest batch that each tree can have, and the layout of its rounds."""
        after = [least - 1 for least, _ in self.trees if least <= self.max_batch]
        return tuple((batch, self.at(batch)) for batch in (*after, self.max_batch) if batch)

    @property
    def num_slots(self) -> int:
        """Rows of the slot table: one a running request, and slot 0, which pads batches."""
        return self.max_batch + 1

    @property
    def pool(self) -> int:
        """Candidates that one draft scores: topk at level 1, topk² at each later level."""
        return max_draft_tokens(self.steps, self.topk) - 1

    @property
    def extend_width(self) -> int:
        """Tokens that one round can decide, and rows of the draft's extend."""
        return self.steps + 1

    @property
    def ancestor_words(self) -> int:
        return -(-self.num_draft_tokens // ANCESTOR_BITS)

    @property
    def beam_rows(self) -> int:
        """Draft rows staged while a tree grows: topk beams for every level but the last."""
        return self.beams_above(max(self.steps, 1))

    @property
    def beam_words(self) -> int:
        """Ancestor words of a draft row."""
        return -(-self.beam_rows // ANCESTOR_BITS)

    def beams_above(self, level: int) -> int:
        """Draft rows of the levels above `level`, the first being level 1."""
        return (level - 1) * self.topk

    @property
    def verify_rows(self) -> int:
        """Nodes of the fullest batch of trees."""
        return max(batch * layout.num_draft_tokens for batch, layout in self.fullest)

    @property
    def target_rows(self) -> int:
        """Rows of the target's staging: of the largest verify or prefill pass."""
        return max(self.verify_rows, self.chunk_size)

    @property
    def draft_rows(self) -> int:
        """Rows of the draft's staging: of the fullest batch's beams, or of its extend after a round or a prefill
        pass."""
        of_rounds = max(batch * max(layout.beam_rows, layout.extend_width) for batch, layout in self.fullest)
        return max(of_rounds, self.chunk_size)

    @property
    def chunk_widths(self) -> tuple[int, ...]:
        """The uniform widths that a prefill pass may have: doublings up to chunk_size, and the middle between each."""
        doublings = [MIN_CHUNK_WIDTH << i for i in range(self.chunk_size.bit_length())]
        middles = [width + width // 2 for width in doublings[1:]]
        return (*sorted(width for width in doublings + middles if width < self.chunk_size), self.chunk_size)

    def max_pieces(self, width: int) -> int:
        """Pieces of this width that one prefill pass holds."""
        return self.chunk_size // width

    def max_pass_rows(self, decoding: bool) -> int:
        """Rows of a prefill pass.  decoding: whether running requests wait for it."""
        return self.busy_chunk_size or self.chunk_size if decoding else self.chunk_size

    def tokens_ahead(self, rounds: int) -> int:
        """Rows that may come to exist from the last root the host has seen on, its own included.

        rounds: launched and not yet read, the one about to be launched included.
        """
        return rounds * self.extend_width + 1

    def committed_at_most(self, num_known: int, unread: int) -> int:
        """Rows of the target that a launch may find committed.

        num_known: index of the last root the host has seen; unread: rounds launched before this launch and not read.
        """
        return num_known + unread * self.extend_width

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def whole_pages(self, tokens: int) -> int:
        """Pages that the first `tokens` rows fill to the end."""
        return tokens // self.page_size

    def tokens_in(self, pages: int) -> int:
        return pages * self.page_size

    def reserve(self, num_known: int, rounds: int, end: int) -> int:
        """Pages that a request must hold before a launch.

        num_known: index of the last root the host has seen; rounds: launched and unread, this one included;
        end: the tokens after which the request is finished, past which a round decides one token at most.
        """
        return self.pages_for(min(num_known + self.tokens_ahead(rounds), end + rounds - 1))

    def max_accept_depth(self, end: Number, prefix_len: Number) -> Number:
        """The deepest node that a round may accept: tokens left before `end`, past the root and the target's own pick.

        Below 0 where the request is finished.  Takes integers, or tensors of them.
        """
        return end - 2 - prefix_len

    def max_appended_pages(self, batch: int) -> int:
        """Entries that the page tables of a batch can grow by from one round to the next."""
        return batch * (1 + self.pages_for(self.tokens_ahead(ROUNDS_IN_FLIGHT)))

    def batch_buckets(self, largest: int) -> tuple[int, ...]:
        """The batches that rounds are padded to, up to `largest`: powers of two and the middle between each."""
        return tuple(sorted({min(next_bucket(batch), largest) for batch in range(1, largest + 1)}))

    @property
    def history_width(self) -> int:
        return self.max_context + self.tokens_ahead(ROUNDS_IN_FLIGHT)

    @property
    def table_width(self) -> int:
        """Pages a request can ever hold: columns of the page table."""
        return self.pages_for(self.history_width)

    @property
    def position_rows(self) -> int:
        """Positions that a node can have: rows of rotary tables.  A padded chunk reaches past the last token."""
        return self.history_width + max(self.steps, self.chunk_size)

    @property
    def least_pages(self) -> int:
        """Pages of a pool that can hold one request to the context's end, the dummy included."""
        return 1 + self.table_width

    @property
    def most_pages(self) -> int:
        """Pages of a pool that a full batch of full contexts can use, the dummy included."""
        return 1 + self.max_batch * self.table_width

    def require_batch(self, batch: int) -> None:
        """Check, on the host, that the buffers of a round hold a batch.  Raises EspalierError."""
        if batch > self.max_batch:
            raise EspalierError(
                f"buffers hold the rounds of {self.max_batch} requests and this launch has {batch}; "
                f"both follow from {self}: launch no more than max_batch requests, or raise it"
            )

    def require_chunk(self, batch: int, width: int) -> None:
        """Check, on the host, that a prefill pass is no larger than was laid out.  Raises EspalierError."""
        if batch * width > self.chunk_size:
            raise EspalierError(
                f"a prefill pass holds {self.chunk_size} rows and this launch needs {batch} · {width}; "
                f"both follow from {self}: launch fewer or narrower chunks, or raise chunk_size"
            )

    def require(self, name: str, tensor: Tensor, *shape: int) -> None:
        """Check a buffer's shape on the host; -1 leaves a dimension free.

        Raises EspalierError naming the buffer, what it needs, what it holds, and the sizes both follow from.
        """
        fits = tensor.ndim == len(shape) and all(
            need in (-1, have) for need, have in zip(shape, tensor.shape, strict=True)
        )
        if not fits:
            raise EspalierError(
                f"buffer {name} needs shape {list(shape)} and holds {list(tensor.shape)}; both follow from {self}: "
                "allocate and launch from the same layout"
            )
