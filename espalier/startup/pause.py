"""Bounds the pause of streams while prompts enter: the rows of a prefill pass, from its predicted time.

The time is predicted as that of a round is (tree_cost.py), from what the GPU was measured to do at the start.
"""

import logging

from espalier.config import EngineConfig, is_open
from espalier.errors import EspalierError
from espalier.layout import MIN_CHUNK_WIDTH
from espalier.startup.tree_policy import Machine

# The bound by default.  An 8B on an H100 enters some 640 rows in it.
PAUSE_MS = 20.0
# Where the weights alone take that long to read, a pass may take so many times as long as its smallest form: with fewer
# rows, prompts would enter at less than half the rate.
LEAST_RATE = 2.0
log = logging.getLogger("espalier")


def busy_chunk_size(config: EngineConfig, chunk_size: int, default: int, machine: Machine | None) -> int:
    """Rows of a prefill pass that streams wait for.

    chunk_size: the most rows of a pass; default: of a machine for which nothing is predicted.
    Raises EspalierError if both the rows and the pause are set, if the smallest pass takes longer than the pause, and
    for a pause on a machine for which nothing is predicted.
    """
    if not is_open(config.busy_chunk_size):
        if not is_open(config.max_pause_ms):
            raise EspalierError(
                f"max_pause_ms={config.max_pause_ms} and busy_chunk_size={config.busy_chunk_size} both bound the "
                "passes that streams wait for; remove one of them"
            )
        return int(config.busy_chunk_size)
    if machine is None:
        if not is_open(config.max_pause_ms):
            raise EspalierError(
                f"max_pause_ms={config.max_pause_ms} needs the predicted time of a pass, and a CPU has none; set "
                "busy_chunk_size, the rows of a pass, instead"
            )
        return min(default, chunk_size)
    least = _pass_ms(machine, MIN_CHUNK_WIDTH)
    bound_ms = max(PAUSE_MS, LEAST_RATE * least) if is_open(config.max_pause_ms) else float(config.max_pause_ms)
    if bound_ms < least:
        raise EspalierError(
            f"max_pause_ms={config.max_pause_ms} is below the {least:.1f} ms that the smallest prefill pass, of "
            f"{MIN_CHUNK_WIDTH} rows, is predicted to take on {machine.chip.gpu}; raise it"
        )
    # The widths of passes are multiples of MIN_CHUNK_WIDTH.
    steps_down = range(chunk_size // MIN_CHUNK_WIDTH, 0, -1)
    rows = next(step * MIN_CHUNK_WIDTH for step in steps_down if _pass_ms(machine, step * MIN_CHUNK_WIDTH) <= bound_ms)
    log.info(
        "streams wait for prefill passes of at most %d rows, predicted to take %.1f ms (max_pause_ms=%.4g%s)",
        rows,
        _pass_ms(machine, rows),
        bound_ms,
        "" if not is_open(config.max_pause_ms) else ", by default",
    )
    return rows


def _pass_ms(machine: Machine, rows: int) -> float:
    return machine.weights.target_seconds(rows, machine.chip) * 1000
