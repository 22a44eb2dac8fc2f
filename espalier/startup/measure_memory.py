"""Measures how many pages fit on a GPU.

The largest launches run once on the dummy slot.  The memory that they need is left free, and pages take the rest.
"""

import gc
from dataclasses import dataclass, replace

import torch

from espalier.cache.kv import bytes_per_token
from espalier.engine.cuda import CudaExecutor
from espalier.engine.launch_input import LaunchInput, of_dummies
from espalier.errors import EspalierError
from espalier.layout import RoundLayout
from espalier.startup.build import Loaded, make_runner
from espalier.startup.dummies import fullest_pass, smaller_passes

# Pages of the trial runner: the dummy page, and one that a request could hold.
TRIAL_PAGES = 2
# Share of the GPU's memory that is left free for later growth: library handles, fragmentation, other processes.
MARGIN = 0.02


@dataclass(frozen=True)
class Needs:
    """Measured memory in bytes.

    eager_bytes: peak of the largest launch; graph_bytes: peak of the largest launch that may be captured.
    free_bytes: free between launches, with the models, the layout's buffers and TRIAL_PAGES pages allocated.
    total_bytes: memory of the GPU.
    """

    eager_bytes: int
    graph_bytes: int
    free_bytes: int
    total_bytes: int


def measure_pages(loaded: Loaded, requested: int | None) -> int:
    """Number of pages, dummy page included, that fit in addition to models, buffers and the largest launches.

    requested: pages that the user wants.  Their number is checked and returned.  Raises EspalierError if they do not
    fit, or, without them, if not even one full context fits.
    """
    layout, device, graph_batch = loaded.config.layout, loaded.device, loaded.config.graph_batch
    page_bytes = layout.tokens_in(bytes_per_token(loaded.specs, loaded.dtype))
    needs = _measure_needs(loaded)
    # CUDA graphs keep the memory of a launch in their own pool, in addition to the memory of eager launches.
    reserved = needs.eager_bytes + (needs.graph_bytes if graph_batch else 0) + int(needs.total_bytes * MARGIN)
    affordable = TRIAL_PAGES + (needs.free_bytes - reserved) // page_bytes
    reason = (
        f"{device} holds {max(affordable, 0)}: of its {_gib(needs.total_bytes)}, models, buffers and other processes "
        f"leave {_gib(needs.free_bytes)}, and launches need {_gib(reserved)}"
    )
    if requested is not None and requested > affordable:
        raise EspalierError(f"num_pages={requested} do not fit, {reason}; lower it, or leave it to 'auto'")
    if requested is None and affordable < layout.least_pages:
        raise EspalierError(
            f"max_context={layout.max_context} needs {layout.least_pages} pages of {layout.page_size} tokens, and "
            f"{reason}; lower max_context, or max_batch, num_draft_tokens and chunk_size, which make launches large"
        )
    return min(affordable, layout.most_pages) if requested is None else requested


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def _measure_needs(loaded: Loaded) -> Needs:
    """Measure with a trial runner.  Its memory is freed before this returns."""
    layout, device = loaded.config.layout, loaded.device
    try:
        # No name holds the runner: it must be gone when the memory is freed below.
        return measure(
            CudaExecutor(make_runner(loaded.with_pages(TRIAL_PAGES)), graph_batch=0, capture_stages=True),
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


def measure(executor: CudaExecutor, layout: RoundLayout, device: torch.device, graph_batch: int) -> Needs:
    """Run the largest prefill pass of each width, with all log-probabilities, and the largest round of each tree.

    The kernels of all other prefill passes are compiled here too, and those of rounds that will run eagerly, so that
    none compiles while requests wait.  A capture compiles what it captures.
    """
    passes = [fullest_pass(layout, width) for width in layout.chunk_widths]
    # Ascending, so that the largest batch of each tree stays.
    staged = {layout.at(batch).tree: replace(of_dummies(batch), is_staged=True) for batch in executor.buckets}
    forms = sorted(layout.round_forms(executor.buckets), key=lambda form: form.batch)
    largest = {form.tree or layout.at(form.batch).tree: of_dummies(*form) for form in forms}
    rounds = [*largest.values(), *staged.values()]
    compiled = executor.dummy_rounds if graph_batch < layout.max_batch else rounds
    executor.compile([*compiled, *passes, *smaller_passes(layout, executor.runner.target.config.vocab_size)])
    captured = [*rounds, *(of_dummies(*layout.captured_passes[-1]),) * executor.runner.captures_prefill]
    graph_bytes = max(_peak_bytes(executor, launch_input, device) for launch_input in captured)
    pass_bytes = [_peak_bytes(executor, launch_input, device) for launch_input in passes]
    return Needs(max(graph_bytes, *pass_bytes), graph_bytes, *torch.cuda.mem_get_info(device))


def _peak_bytes(executor: CudaExecutor, launch_input: LaunchInput, device: torch.device) -> int:
    """Peak bytes that PyTorch reserves for a launch.  Reserved, not allocated: freed memory may stay fragmented."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    executor.run_dummies(launch_input)
    peak = torch.cuda.max_memory_reserved(device)
    torch.cuda.empty_cache()
    return peak - before
