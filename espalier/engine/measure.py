"""How many pages a GPU holds, measured: the largest launches run once, on the dummy request, and what they need is left
free."""

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from espalier.engine.cuda import EVERYTHING, CudaExecutor
from espalier.engine.ticket import Ticket
from espalier.errors import EspalierError
from espalier.layout import RoundLayout
from espalier.speculate.round import Round

# A trial's pages: the dummy, and one that a request could hold.
TRIAL_PAGES = 2
# Of the whole memory, for what grows late: handles of libraries, fragments, another process's context.
MARGIN = 0.02


@dataclass(frozen=True)
class Needs:
    """Bytes of the largest launches beside what is always held."""

    prefill: int
    round: int


def measured_pages(
    layout: RoundLayout, make: Callable[[int], Round], page_bytes: int, device: torch.device, graph_batch: int
) -> int:
    """Pages that fit beside the models, the buffers of the layout and the largest launches, the dummy included.

    make: a Round with so many pages.  Raises EspalierError where not even one full context fits.
    """
    trial = CudaExecutor(make(TRIAL_PAGES), graph_batch=0)
    needs = measure(trial, layout, device)
    free, total = torch.cuda.mem_get_info(device)
    del trial
    gc.collect()
    torch.cuda.empty_cache()
    # A graph keeps what a round needs in a pool of its own, beside what eager launches use.
    kept = max(needs.prefill, needs.round) + (needs.round if graph_batch else 0) + int(total * MARGIN)
    affordable = TRIAL_PAGES + (free - kept) // page_bytes
    if affordable < layout.least_pages:
        raise EspalierError(
            f"max_context={layout.max_context} needs {layout.least_pages} pages of {layout.page_size} tokens, and "
            f"{device} holds {max(affordable, 0)} beside the models and {kept / 2**30:.1f} GiB for launches; "
            "lower max_context, max_batch or chunk_size, or set num_pages yourself"
        )
    return min(affordable, layout.most_pages)


def measure(executor: CudaExecutor, layout: RoundLayout, device: torch.device) -> Needs:
    """Run the widest prefill passes and the fullest round."""
    widths = {layout.chunk_widths[0], layout.chunk_widths[-1]}
    passes = [(layout.chunk_batch(width), width) for width in widths]
    prefill = max(_peak(executor, _of_dummies(batch, width), device) for batch, width in passes)
    return Needs(prefill, _peak(executor, _of_dummies(layout.max_batch, 0), device))


def _of_dummies(batch: int, width: int) -> Ticket:
    dummies = (0,) * batch
    return Ticket(slots=dummies, shaping=EVERYTHING, lengths=dummies if width else (), width=width)


def _peak(executor: CudaExecutor, ticket: Ticket, device: torch.device) -> int:
    """Bytes that a launch takes at most, from the driver's view: what it frees may stay in pieces."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    executor.launch(ticket).result()
    most = torch.cuda.max_memory_reserved(device)
    torch.cuda.empty_cache()
    return most - held
