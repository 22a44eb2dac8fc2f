"""Divides the free memory between slots, pages and snapshots of states, before weights are loaded."""

import logging
from typing import TYPE_CHECKING

import torch

from espalier.cache.kv import bytes_beside_pages, bytes_per_token
from espalier.cache.states import bytes_per_state
from espalier.config import EngineConfig, is_open
from espalier.errors import EspalierError
from espalier.layout import RoundLayout

if TYPE_CHECKING:
    from espalier.startup.resolve import Facts


# By default the states of slots take at most one part in so many of the memory that weights leave.
STATES_SHARE = 4
log = logging.getLogger(__name__)


def choose_max_batch(config: EngineConfig, facts: "Facts", dtype: torch.dtype, most: int) -> int:
    """The user's max_batch, else `most`, or fewer where the states of so many slots would take too much memory."""
    if not is_open(config.max_batch):
        return int(config.max_batch)
    state_bytes = bytes_per_state(facts.layer_specs, dtype)
    left = max(facts.free_bytes - facts.weights.nbytes(dtype), 0)
    if not state_bytes or most * state_bytes <= left // STATES_SHARE:
        return most
    chosen = max(left // STATES_SHARE // state_bytes, 1)
    log.info(
        "max_batch=%d, not %d: the states of a request take %.0f MiB, and those of all at most 1/%d of the %.1f GiB "
        "that weights leave",
        *(chosen, most, state_bytes / 2**20, STATES_SHARE, left / 2**30),
    )
    return chosen


def pages_and_snapshots(
    config: EngineConfig,
    layout: RoundLayout,
    facts: "Facts",
    dtype: torch.dtype,
    memory_share: float,
    prefix_cache: bool,
) -> tuple[int, int]:
    """num_pages and num_snapshots: the user's, else those that fit into a share of the free memory.

    num_pages includes the dummy page, and is at most the pages of a full batch of full contexts.  Raises EspalierError
    if the weights or what the user wants do not fit, or if not even one full context fits.
    """
    page_bytes = layout.tokens_in(bytes_per_token(facts.layer_specs, dtype))
    buffers = bytes_beside_pages(
        layout, facts.layer_specs[: facts.num_layers], facts.layer_specs[facts.num_layers :], dtype
    )
    weights = facts.weights.nbytes(dtype)
    available = facts.free_bytes - weights - buffers
    if available < 0:
        raise EspalierError(
            f"the weights in {str(dtype).removeprefix('torch.')} ({weights / 2**30:.1f} GiB) and the buffers of "
            f"max_batch={layout.max_batch} ({buffers / 2**30:.1f} GiB) do not fit into the free memory "
            f"({facts.free_bytes / 2**30:.1f} GiB); use a smaller dtype, a smaller or quantised model, or a lower "
            "max_batch"
        )
    free = f"the free memory ({facts.free_bytes / 2**30:.1f} GiB, weights included)"
    state_bytes = bytes_per_state(facts.layer_specs, dtype)
    num_snapshots = _num_snapshots(config, layout, state_bytes, int(available * memory_share), prefix_cache)
    available -= num_snapshots * state_bytes
    if available < 0:
        raise EspalierError(
            f"num_snapshots={num_snapshots} need {num_snapshots * state_bytes / 2**30:.1f} GiB, which {free} does not "
            "hold; lower it, or leave it to 'auto'"
        )
    if isinstance(config.num_pages, int):
        if config.num_pages * page_bytes > available:
            raise EspalierError(
                f"num_pages={config.num_pages} of {layout.page_size} tokens needs "
                f"{config.num_pages * page_bytes / 2**30:.1f} GiB and {free} holds {max(available // page_bytes, 0)} "
                "pages; lower it, or leave it to 'auto'"
            )
        return config.num_pages, num_snapshots
    affordable = int(available * memory_share) // page_bytes
    if affordable < layout.least_pages:
        raise EspalierError(
            f"max_context={layout.max_context} needs {layout.least_pages} pages of {layout.page_size} tokens and "
            f"{free} holds {max(affordable, 0)}; lower max_context or max_batch, or set num_pages yourself"
        )
    return min(affordable, layout.most_pages), num_snapshots


def _num_snapshots(config: EngineConfig, layout: RoundLayout, state_bytes: int, share: int, prefix_cache: bool) -> int:
    """share: bytes for pages and snapshots.  Raises EspalierError for snapshots that nothing would use."""
    if not state_bytes or not prefix_cache:
        if not is_open(config.num_snapshots) and config.num_snapshots:
            why = "the prefix cache is off" if state_bytes else "no layer of this model keeps a recurrent state"
            raise EspalierError(f"num_snapshots={config.num_snapshots} is set, but {why}; leave it out")
        return 0
    if not is_open(config.num_snapshots):
        return int(config.num_snapshots)
    return min(4 * layout.max_batch, share // 4 // state_bytes)
