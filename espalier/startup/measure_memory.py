"""Determines how many requests, pages and snapshots fit into memory.

On a GPU, the number of pages is measured.  The largest launches (prefill passes and rounds) run once on the dummy slot,
and pages take all memory that these launches do not need.
"""

import gc
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from espalier.cache.kv import bytes_beside_pages, bytes_per_token
from espalier.cache.states import bytes_per_state
from espalier.config import EngineConfig, is_unresolved
from espalier.engine.cuda import CudaExecutor
from espalier.engine.launch_input import LaunchInput, dummy_launch
from espalier.errors import EspalierError
from espalier.layout import RoundLayout
from espalier.limits import MAX_LOGPROBS
from espalier.sampling.mask import mask_words
from espalier.sampling.prompt import PromptRows
from espalier.startup.build import LoadedModels, make_runner

if TYPE_CHECKING:
    from espalier.startup.resolve import StartupInfo


def largest_prefill_pass(layout: RoundLayout, width: int) -> LaunchInput:
    """Returns the largest pass whose pieces of prompts have `width` rows.  It has the maximum numbers of pieces and
    requests, and log-probabilities for all rows."""
    num_pieces = layout.max_pieces(width)
    return dummy_prefill_pass(width, num_pieces, min(layout.max_batch, num_pieces), num_pieces * width)


def smaller_prefill_passes(layout: RoundLayout, vocab_size: int) -> Iterator[LaunchInput]:
    """Yields smaller passes, which together use all remaining kernels: those that no `largest_prefill_pass` uses.
    The block sizes of kernels depend on the number of rows, usually rounded up to a power of two.  So passes of the
    smallest width have 2^n or 2^n + 1 pieces.  Triton compiles separate code for 1 row, and for multiples of 16."""
    narrowest, *wider = layout.chunk_widths
    max_pieces = layout.max_pieces(narrowest)
    powers = [1 << i for i in range(max_pieces.bit_length())]
    for num_pieces in powers:
        requests = min(num_pieces, layout.max_batch)
        masks = np.zeros((requests, 1, mask_words(vocab_size)), np.int32)
        yield replace(dummy_prefill_pass(narrowest, num_pieces, requests, num_pieces * narrowest), masks=masks)
    for num_pieces in (1, *(power + 1 for power in powers)):
        if num_pieces <= max_pieces:
            requests = min(max(num_pieces // 2, 1), layout.max_batch)
            yield dummy_prefill_pass(narrowest, num_pieces, requests, (num_pieces - 1) * narrowest + 1)
    yield from prefill_passes_without_logprobs(layout, powers)
    # Attention chooses kernels by the width, and by whether the pieces fill the GPU.
    for width in wider:
        for num_pieces in range(1, min(2, layout.max_pieces(width)) + 1):
            yield dummy_prefill_pass(width, num_pieces, 1, 0)


def prefill_passes_without_logprobs(layout: RoundLayout, powers: Sequence[int]) -> Iterator[LaunchInput]:
    """Yields passes without log-probabilities, in which the last layer computes only one row of each piece.
    powers: the powers of two up to the largest number of pieces of a pass.  Powers up to max_batch are left out,
    because rounds of so many requests use the same kernels."""
    narrowest, *wider = layout.chunk_widths
    max_pieces = layout.max_pieces(narrowest)
    large = [power for power in powers if power > layout.max_batch]
    piece_counts = {max_pieces - 1, *large, *(power * 3 // 2 + 1 for power in large), *(power + 1 for power in powers)}
    for num_pieces in sorted(piece_counts):
        if 0 < num_pieces <= max_pieces:
            yield dummy_prefill_pass(narrowest, num_pieces, min(num_pieces, layout.max_batch), 0)
    for width in wider[:1]:
        yield dummy_prefill_pass(width, layout.max_pieces(width), 1, 0)


def dummy_prefill_pass(width: int, num_pieces: int, num_requests: int, num_reported_rows: int) -> LaunchInput:
    """Returns a pass of dummy slots whose pieces are spread over the requests.
    width: rows of a piece.  num_reported_rows: log-probabilities are reported for this many rows, the first rows of
    the pass."""
    dummies = dummy_launch(num_requests, width, num_pieces if num_pieces > num_requests else 0)
    rows = None
    if num_reported_rows:
        others = num_requests - 1
        rows = PromptRows(((0, num_reported_rows), *((0, 0),) * others), (MAX_LOGPROBS, *(0,) * others))
    return replace(dummies, prompt_rows=rows)


# How many pages there are while memory is measured: the dummy page, and one page for a request.
TRIAL_PAGES = 2
# Share of the GPU's memory that stays free for library handles, fragmentation and other processes.
MEMORY_MARGIN = 0.02


@dataclass(frozen=True)
class MeasuredMemory:
    """Measured memory, in bytes.
    eager_bytes: the peak of the largest launch; graph_bytes: the peak of the largest launch that may be captured.
    free_bytes: the free memory between launches, while models, buffers and TRIAL_PAGES pages are allocated.
    total_bytes: the memory of the GPU."""

    eager_bytes: int
    graph_bytes: int
    free_bytes: int
    total_bytes: int


def measure_pages(loaded: LoadedModels, requested_pages: int | None) -> int:
    """Returns the number of pages (dummy page included) that fit beside models, buffers and the largest launches.
    requested_pages: the user's number of pages, which is checked and returned; None to return the largest possible
    number.  Raises EspalierError if the requested pages do not fit, or if not even one full context fits."""
    layout, device, graph_batch = loaded.config.layout, loaded.device, loaded.config.graph_batch
    page_bytes = layout.tokens_in(bytes_per_token(loaded.layer_specs, loaded.dtype))
    measured = _measure_with_trial_runner(loaded)
    # CUDA graphs hold the memory of a launch in a separate pool, in addition to the memory of eager launches.
    reserved_bytes = (
        measured.eager_bytes + (measured.graph_bytes if graph_batch else 0) + int(measured.total_bytes * MEMORY_MARGIN)
    )
    num_affordable = TRIAL_PAGES + (measured.free_bytes - reserved_bytes) // page_bytes
    reason = (
        f"{device} holds {max(num_affordable, 0)}: of its {_gib(measured.total_bytes)}, models, buffers and other "
        f"processes leave {_gib(measured.free_bytes)}, and launches need {_gib(reserved_bytes)}"
    )
    if requested_pages is not None and requested_pages > num_affordable:
        raise EspalierError(f"num_pages={requested_pages} do not fit, {reason}; lower it, or leave it to 'auto'")
    if requested_pages is None and num_affordable < layout.min_pages:
        raise EspalierError(
            f"max_context={layout.max_context} needs {layout.min_pages} pages of {layout.page_size} tokens, and "
            f"{reason}; lower max_context, or max_batch, num_draft_tokens and chunk_size, which make launches large"
        )
    return min(num_affordable, layout.max_pages) if requested_pages is None else requested_pages


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _measure_with_trial_runner(loaded: LoadedModels) -> MeasuredMemory:
    """Measures the memory of launches with a ModelRunner that has few pages, and then frees the runner's memory."""
    layout, device = loaded.config.layout, loaded.device
    try:
        # The runner is not assigned to a variable, so that it is freed before the memory is released below.
        return measure_launch_memory(
            CudaExecutor(make_runner(loaded.with_num_pages(TRIAL_PAGES)), graph_batch=0, capture_stages=True),
            layout,
            device,
            loaded.config.graph_batch,
        )
    except torch.OutOfMemoryError:
        raise EspalierError(
            f"the largest launches of max_batch={layout.max_batch}, num_draft_tokens={layout.num_draft_tokens} and "
            f"chunk_size={layout.chunk_size} do not fit on {device} beside the models; lower one of them"
        ) from None
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def measure_launch_memory(
    executor: CudaExecutor, layout: RoundLayout, device: torch.device, graph_batch: int
) -> MeasuredMemory:
    """Runs the largest prefill pass of each width and the largest round of each tree, and returns the memory needed.
    The passes report all log-probabilities.  This function also compiles the kernels of all other prefill passes and of
    eager rounds, so that no kernel is compiled while requests wait.  Kernels of CUDA graphs are compiled when graphs
    are captured."""
    passes = [largest_prefill_pass(layout, width) for width in layout.chunk_widths]
    # Batches ascend, and a later batch replaces the batches of the same tree.  So each tree keeps its largest batch.
    staged = {
        layout.for_batch(batch).tree: replace(dummy_launch(batch), is_staged=True) for batch in executor.batch_buckets
    }
    forms = sorted(layout.round_forms(executor.batch_buckets), key=lambda form: form.batch)
    largest = {form.tree or layout.for_batch(form.batch).tree: dummy_launch(*form) for form in forms}
    rounds = [*largest.values(), *staged.values()]
    compiled = executor.dummy_rounds if graph_batch < layout.max_batch else rounds
    executor.compile_kernels(
        [*compiled, *passes, *smaller_prefill_passes(layout, executor.runner.target.config.vocab_size)]
    )
    captured = [*rounds, *(dummy_launch(*form) for form in executor.runner.captured_passes[-1:])]
    graph_bytes = max(_peak_bytes(executor, launch_input, device) for launch_input in captured)
    pass_bytes = [_peak_bytes(executor, launch_input, device) for launch_input in passes]
    return MeasuredMemory(max(graph_bytes, *pass_bytes), graph_bytes, *torch.cuda.mem_get_info(device))


def _peak_bytes(executor: CudaExecutor, launch_input: LaunchInput, device: torch.device) -> int:
    """Returns the peak number of bytes that PyTorch reserves for a launch.
    Reserved bytes are measured instead of allocated bytes, because freed memory may stay fragmented."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    executor.run_dummy_launch(launch_input)
    peak = torch.cuda.max_memory_reserved(device)
    torch.cuda.empty_cache()
    return peak - before


# By default, the states of all slots take at most 1 / STATES_MEMORY_DIVISOR of the memory that is free after loading
# weights.
STATES_MEMORY_DIVISOR = 4
log = logging.getLogger(__name__)


def choose_max_batch(config: EngineConfig, info: "StartupInfo", dtype: torch.dtype, default: int) -> int:
    """Returns the user's max_batch.  If it is "auto", returns `default`, or less if the recurrent states of `default`
    slots would take too much memory (STATES_MEMORY_DIVISOR)."""
    if not is_unresolved(config.max_batch):
        return int(config.max_batch)
    state_bytes = bytes_per_state(info.layer_specs, dtype)
    bytes_left = max(info.free_bytes - info.weights.nbytes(dtype), 0)
    if not state_bytes or default * state_bytes <= bytes_left // STATES_MEMORY_DIVISOR:
        return default
    chosen = max(bytes_left // STATES_MEMORY_DIVISOR // state_bytes, 1)
    log.info(
        "max_batch=%d, not %d: the states of a request take %.0f MiB, and those of all at most 1/%d of the %.1f GiB "
        "that weights leave",
        *(chosen, default, state_bytes / 2**20, STATES_MEMORY_DIVISOR, bytes_left / 2**30),
    )
    return chosen


def choose_num_pages_and_snapshots(
    config: EngineConfig,
    layout: RoundLayout,
    info: "StartupInfo",
    dtype: torch.dtype,
    memory_share: float,
    prefix_cache: bool,
) -> tuple[int, int]:
    """Returns (num_pages, num_snapshots): the user's numbers, else the numbers that fit into `memory_share` of the free
    memory.

    num_pages includes the dummy page, and is at most the number of pages for a full batch of full contexts.
    Raises EspalierError if the weights or the user's numbers do not fit, or if not even one full context fits.
    """
    page_bytes = layout.tokens_in(bytes_per_token(info.layer_specs, dtype))
    buffers = bytes_beside_pages(
        layout, info.layer_specs[: info.num_layers], info.layer_specs[info.num_layers :], dtype
    )
    weights = info.weights.nbytes(dtype)
    available = info.free_bytes - weights - buffers
    if available < 0:
        raise EspalierError(
            f"the weights in {str(dtype).removeprefix('torch.')} ({_gib(weights)}) and the buffers of "
            f"max_batch={layout.max_batch} ({_gib(buffers)}) do not fit into the free memory "
            f"({_gib(info.free_bytes)}); use a smaller dtype, a smaller or quantised model, or a lower "
            "max_batch"
        )
    free = f"the free memory ({_gib(info.free_bytes)}, weights included)"
    state_bytes = bytes_per_state(info.layer_specs, dtype)
    num_snapshots = _num_snapshots(config, layout, state_bytes, int(available * memory_share), prefix_cache)
    available -= num_snapshots * state_bytes
    if available < 0:
        raise EspalierError(
            f"num_snapshots={num_snapshots} need {_gib(num_snapshots * state_bytes)}, which {free} does not "
            "hold; lower it, or leave it to 'auto'"
        )
    if isinstance(config.num_pages, int):
        if config.num_pages * page_bytes > available:
            raise EspalierError(
                f"num_pages={config.num_pages} of {layout.page_size} tokens needs "
                f"{_gib(config.num_pages * page_bytes)} and {free} holds {max(available // page_bytes, 0)} "
                "pages; lower it, or leave it to 'auto'"
            )
        return config.num_pages, num_snapshots
    num_affordable = int(available * memory_share) // page_bytes
    if num_affordable < layout.min_pages:
        raise EspalierError(
            f"max_context={layout.max_context} needs {layout.min_pages} pages of {layout.page_size} tokens and "
            f"{free} holds {max(num_affordable, 0)}; lower max_context or max_batch, or set num_pages yourself"
        )
    return min(num_affordable, layout.max_pages), num_snapshots


def _num_snapshots(config: EngineConfig, layout: RoundLayout, state_bytes: int, budget: int, prefix_cache: bool) -> int:
    """Returns the number of snapshots of recurrent states.  budget: the bytes for pages and snapshots together.
    Raises EspalierError if the user sets num_snapshots, but the model has no states or the prefix cache is off."""
    if not state_bytes or not prefix_cache:
        if not is_unresolved(config.num_snapshots) and config.num_snapshots:
            reason = "the prefix cache is off" if state_bytes else "no layer of this model keeps a recurrent state"
            raise EspalierError(f"num_snapshots={config.num_snapshots} is set, but {reason}; leave it out")
        return 0
    if not is_unresolved(config.num_snapshots):
        return int(config.num_snapshots)
    return min(4 * layout.max_batch, budget // 4 // state_bytes)
