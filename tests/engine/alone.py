"""What a request says when it is alone, in lock-step, with pages to spare and no prefix cache: each disturbance is held
against it."""

from dataclasses import dataclass, replace
from functools import cache

from espalier.engine.engine import Engine
from espalier.logprobs import TokenLogprob
from espalier.request import Request
from tests.harness import Setup


@dataclass(frozen=True)
class Said:
    tokens: list[int]
    from_draft: list[bool]
    reason: str | None
    logprobs: list[TokenLogprob]


def alone(setup: Setup, r: Request) -> Said:
    """r's prompt, parameters and seed, run on an engine of their own with this tree."""
    quiet = replace(setup, page_size=16, max_batch=1, chunk_size=32, num_pages=None, overlap=False, prefix_cache=False)
    key = (quiet, tuple(r.prompt), repr(r.params), r.seed)
    if key not in _said:
        copy = replace_request(r)
        engine = _engine(quiet)
        engine.add(copy)
        while engine.has_work:
            engine.step()
        _said[key] = Said(copy.output, copy.from_draft, copy.finish_reason, copy.logprobs)
    return _said[key]


def plainly(setup: Setup, r: Request) -> Said:
    """Alone, by plain decoding."""
    return alone(setup.plain(), r)


def replace_request(r: Request) -> Request:
    """The same request, not yet run."""
    return Request(r.id, list(r.prompt), r.params, r.seed, r.arrival_index, r.stop_ids)


_said: dict[tuple, Said] = {}


@cache
def _engine(setup: Setup) -> Engine:
    return setup.engine()
