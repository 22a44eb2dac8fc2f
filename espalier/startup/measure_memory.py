"""How many pages a GPU holds, measured: the largest launches run once, on the dummy request, and what they need is left
free."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from espalier.engine.cuda import CudaExecutor, of_dummies
from espalier.engine.launch_input import LaunchInput
from espalier.errors import EspalierError
from espalier.layout import RoundLayout
from espalier.limits import MAX_LOGPROBS
from espalier.sampling.prompt import PromptRows
from espalier.speculate.round import ModelRunner

# A trial's pages: the dummy, and one that a request could hold.
TRIAL_PAGES = 2
# Of the whole memory, for what grows late: handles of libraries, fragments, another process's context.
MARGIN = 0.02


@dataclass(frozen=True)
class Needs:
    """Bytes of the largest launches.  eager_bytes: of any of them; round_bytes: of a round that can be captured;
    free_bytes: left beside the models and the buffers of the layout, a trial's pages among them, while nothing runs;
    total_bytes: of the GPU."""

    eager_bytes: int
    round_bytes: int
    free_bytes: int
    total_bytes: int


def measured_pages(
    layout: RoundLayout,
    make: Callable[[int], ModelRunner],
    page_bytes: int,
    device: torch.device,
    graph_batch: int,
    asked: int | None,
) -> int:
    """Pages that fit beside the models, the buffers of the layout and the largest launches, the dummy included.

    make: a ModelRunner with so many pages; asked: pages that the user wants, which then is what is returned.  Raises
    EspalierError where these do not fit, or not even one full context does.
    """
    needs = _measured_needs(layout, make, device)
    # A graph keeps what a round needs in a pool of its own, beside what eager launches use.
    kept = needs.eager_bytes + (needs.round_bytes if graph_batch else 0) + int(needs.total_bytes * MARGIN)
    affordable = TRIAL_PAGES + (needs.free_bytes - kept) // page_bytes
    holds = (
        f"{device} holds {max(affordable, 0)}: of its {_gib(needs.total_bytes)}, {_gib(needs.free_bytes)} are free "
        f"beside models, buffers and what others hold, and launches take {_gib(kept)}"
    )
    if asked is not None and asked > affordable:
        raise EspalierError(f"num_pages={asked} do not fit, {holds}; lower it, or leave it to 'auto'")
    if asked is None and affordable < layout.least_pages:
        raise EspalierError(
            f"max_context={layout.max_context} needs {layout.least_pages} pages of {layout.page_size} tokens, and "
            f"{holds}; lower max_context, or max_batch, num_draft_tokens and chunk_size, which make launches large"
        )
    return min(affordable, layout.most_pages) if asked is None else asked


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def _measured_needs(layout: RoundLayout, make: Callable[[int], ModelRunner], device: torch.device) -> Needs:
    """Of a trial that nothing is left of."""
    try:
        return measure(CudaExecutor(make(TRIAL_PAGES), graph_batch=0), layout, device)
    except torch.OutOfMemoryError:
        raise EspalierError(
            f"the largest launches of max_batch={layout.max_batch}, num_draft_tokens={layout.num_draft_tokens} and "
            f"chunk_size={layout.chunk_size} do not fit {device} beside the models; lower one of them"
        ) from None
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def measure(executor: CudaExecutor, layout: RoundLayout, device: torch.device) -> Needs:
    """Run the fullest prefill pass of every width with every log-probability of its rows reported, and the fullest
    round of every tree."""
    passes = [_fullest_pass(layout.chunk_batch(width), width) for width in layout.chunk_widths]
    captured = [of_dummies(batch) for batch, _ in layout.fullest]
    executor.compile([*captured, *passes])
    rounds = max(_peak(executor, launch_input, device) for launch_input in captured)
    others = [_peak(executor, launch_input, device) for launch_input in passes]
    return Needs(max(rounds, *others), rounds, *torch.cuda.mem_get_info(device))


def _fullest_pass(batch: int, width: int) -> LaunchInput:
    rows = PromptRows(((0, width),) * batch, MAX_LOGPROBS)
    return replace(of_dummies(batch, width), num_logprobs=MAX_LOGPROBS, prompt_rows=rows)


def _peak(executor: CudaExecutor, launch_input: LaunchInput, device: torch.device) -> int:
    """Bytes that a launch takes at most, from the driver's view: what it frees may stay in pieces."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    executor.launch(launch_input).result()
    most = torch.cuda.max_memory_reserved(device)
    torch.cuda.empty_cache()
    return most - held
