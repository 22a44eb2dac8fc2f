"""The splits of split-KV attention, computed on the device once per pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.kernels.runtime.op import op
from espalier.layout import next_bucket

# Splits start at multiples of this.  No kernel has a larger BLOCK_N.
SPLIT_STEP = 64
# The least rows of a split: a shorter one costs more to merge than it saves.  Up to SMALL_TILE packed queries have few
# partial results, large tiles many.  One tile of latent rows is read slowly, so short splits pay there too.
MIN_SPLIT_ROWS, MIN_SHORT_SPLIT_ROWS, MIN_LARGE_TILE_SPLIT_ROWS = 128, 64, 320
SMALL_TILE = 16
# Longer splits are divided further, for any batch: otherwise one long request among short ones runs alone at the end.
MAX_SPLIT_ROWS = 2048
# Number of programs that fill a GPU (H200, docs/log.md).  One program reads K/V at about half the bandwidth of a
# multiprocessor.  With a large query tile (packed queries), one program keeps a multiprocessor's tensor cores busy.
PROGRAMS = 256
LARGE_TILE, LARGE_TILE_PROGRAMS = 128, 128
# Rows of the longest split where one request alone has tiles for half of these programs, as a piece of a prompt has.
# Its partial results would be large, and merging them took 2.5% of a prompt of 8k (docs/log.md).
MAX_MANY_TILES_SPLIT_ROWS = 8192
# For kernels of wide latent rows, whose tiles have 64 packed queries: one program fills a multiprocessor.  A partial
# result has up to 512 values, so merging is expensive, and fewer, longer splits pay.
LATENT_TILE, MAX_LATENT_SPLIT_ROWS = 64, 4096
# Most splits of one request.  The second is for wide latent rows, and for few requests with few KV heads, for which
# MAX_SPLITS would leave a part of the GPU without a program.
MAX_SPLITS, MAX_SPLITS_OF_FEW_HEADS = 32, 128
# Most rows of partial results (queries x splits) of one request.
MAX_PARTIAL_ROWS_PER_REQUEST = 512
# Most float32 values in the partial results of a batch: 256 MiB.
MAX_PARTIAL_VALUES = 2**26
# Columns of the table of splits: request, begin (a multiple of SPLIT_STEP), end (exclusive), number of splits of the
# request.
COLUMNS = 4


@dataclass(frozen=True)
class KVSplitPolicy:
    """How a pass splits the committed rows of each request.

    num_splits: splits of a request, if each gets min_split_rows to max_split_rows rows.  A short request gets fewer.  A
    long request gets more, up to max_splits; at that limit its splits are longer than max_split_rows.
    """

    num_splits: int
    max_splits: int
    max_split_rows: int = MAX_SPLIT_ROWS
    min_split_rows: int = MIN_SPLIT_ROWS

    @classmethod
    def of(
        cls,
        batch: int,
        queries: int,
        kv_heads: int,
        group: int,
        max_rows: int,
        v_size: int,
        wide_latent: bool = False,
    ) -> KVSplitPolicy:
        """The policy that fills a GPU with programs, within the limits of the partial results.

        queries: per request; group: query heads per KV head; max_rows: the most committed rows of a request.  The batch
        is rounded up to its bucket (layout.next_bucket), so that a padded graph and an eager launch split alike.
        wide_latent: whether a kernel for wide latent rows runs (latent_attention.py, hopper/latent.py).
        """
        batch, packed_queries = next_bucket(batch), queries * group
        programs, num_tiles, min_split_rows, max_split_rows = PROGRAMS, 1, MIN_SPLIT_ROWS, MAX_SPLIT_ROWS
        if wide_latent:
            programs, num_tiles = LARGE_TILE_PROGRAMS, -(-packed_queries // LATENT_TILE)
            min_split_rows = MIN_SHORT_SPLIT_ROWS if num_tiles == 1 else MIN_SPLIT_ROWS
            max_split_rows = MAX_LATENT_SPLIT_ROWS
        elif packed_queries > LARGE_TILE // 2:
            programs, num_tiles = LARGE_TILE_PROGRAMS, -(-packed_queries // LARGE_TILE)
            # So few programs have one warpgroup each (choose_hopper_config).  With two, short requests in a layout for
            # long ones would leave most multiprocessors idle.
            most_splits = -(-max_rows // MIN_LARGE_TILE_SPLIT_ROWS)
            if 4 * batch * kv_heads * num_tiles * most_splits < 3 * programs:
                min_split_rows = MIN_LARGE_TILE_SPLIT_ROWS
            if 2 * kv_heads * num_tiles >= programs:
                max_split_rows = MAX_MANY_TILES_SPLIT_ROWS
        elif packed_queries <= SMALL_TILE:
            min_split_rows = MIN_SHORT_SPLIT_ROWS
        wanted = programs // (batch * kv_heads * num_tiles)
        if wide_latent:
            # With more splits, one request would have more work items than a GPU runs at once.
            limit = min(MAX_SPLITS_OF_FEW_HEADS, programs // num_tiles)
        else:
            limit = max(MAX_SPLITS, min(wanted, MAX_SPLITS_OF_FEW_HEADS))
        values = batch * packed_queries * kv_heads * v_size
        limit = min(limit, MAX_PARTIAL_VALUES // values, MAX_PARTIAL_ROWS_PER_REQUEST // queries)
        max_splits = max(1, min(limit, -(-max_rows // min_split_rows)))
        num_splits = min(max(1, wanted), max_splits)
        is_enough = max_rows <= num_splits * max_split_rows
        return cls(num_splits, num_splits if is_enough else max_splits, max_split_rows, min_split_rows)

    def width(self, rows: int) -> int:
        """Rows per split of a request with `rows` rows: an equal share, rounded up to a multiple of SPLIT_STEP.

        The last split may have fewer.
        """
        wanted = max(min(-(-rows // self.min_split_rows), self.num_splits), -(-rows // self.max_split_rows))
        count = min(max(wanted, 1), self.max_splits)
        return max(-(-rows // (count * SPLIT_STEP)), 1) * SPLIT_STEP


@dataclass(frozen=True)
class KVSplits:
    """The splits of a batch.  Every request has at least one split, which may be empty.

    table: [B * policy.max_splits, COLUMNS] int32, one row per split, ordered by request and position; unused rows are
    undefined.  starts: [B + 1] int32, the first split of each request, and at the end the number of splits.
    """

    table: Tensor
    starts: Tensor
    policy: KVSplitPolicy


@op("espalier.kernels.attention.kv_splits")
def kv_splits(
    length: Tensor, first: int, policy: KVSplitPolicy, positions: Tensor | None = None, window: int = 0
) -> KVSplits:
    """Split the committed rows [first, length) of each request.

    length: [B] int64.  positions: [B, Q] int64, of the queries: rows that no query's window reaches are left out.
    window: 0 for no window; then positions may be None.
    """
    batch = length.shape[0]
    table = torch.zeros(batch * policy.max_splits, COLUMNS, dtype=torch.int32)
    starts = [0]
    for request, rows in enumerate(length.tolist()):
        begin = first
        if window and positions is not None:
            begin = max(first, int(positions[request].min()) - window + 1)
        begin = begin // SPLIT_STEP * SPLIT_STEP
        num_rows = max(rows - begin, 0)
        width = policy.width(num_rows)
        count = max(1, -(-num_rows // width))
        for i in range(count):
            low = begin + i * width
            table[starts[-1] + i] = torch.tensor([request, low, min(low + width, max(rows, low)), count])
        starts.append(starts[-1] + count)
    return KVSplits(table.to(length.device), torch.tensor(starts, dtype=torch.int32).to(length.device), policy)
