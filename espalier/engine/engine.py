"""The engine: `Engine.step` is one turn of the main loop.  It admits requests, starts a launch and reads a launch.

scheduler.py decides which requests run.  executor.py (CPU) and cuda.py (GPU) run the launches.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from espalier.cache.pages import PagePool
from espalier.cache.prefix_tree import PrefixTree
from espalier.engine.executor import ClosedExecutor, Executor, Handle, LaunchObserver
from espalier.engine.launch_input import RequestResult
from espalier.engine.scheduler import Launch, Scheduler
from espalier.errors import EspalierError
from espalier.request import OutputChunk, Request, check_prompt
from espalier.stats import SpeculationStats


@dataclass
class InFlight:
    """The launch whose results the host has not read yet.

    With overlap, a launch is read one step after it was started, so the host works while the device runs.
    In lock-step, a launch is read in the step that started it, and `unread` stays None.
    """

    overlap: bool
    unread: tuple[Launch, Handle] | None = None

    def exchange(self, started: tuple[Launch, Handle] | None) -> tuple[Launch, Handle] | None:
        """Take the launch that was just started; return the launch to read now, or None."""
        if not self.overlap or (started is not None and started[0].launch_input.is_staged):
            # The scheduler starts a staged round only when nothing is in flight, so `unread` is None here.
            return started
        previous, self.unread = self.unread, started
        return previous


class Engine:
    """Runs requests until they finish.  Not thread-safe: one thread calls add, abort and step.

    requests: unfinished requests, by id.
    stopped: why the engine no longer runs; None while it works.  If a launch fails, every request in the engine is
    aborted with this text.
    observer: sees every launch; None, the default, costs nothing.
    """

    def __init__(self, executor: Executor, overlap: bool, prefix_cache: bool):
        runner = executor.runner
        self.layout = runner.layout
        self.vocab_size = runner.target.config.vocab_size
        self.executor = executor
        self.pool = PagePool(runner.pages.num_pages)
        self.prefixes = PrefixTree(self.pool, self.layout.page_size) if prefix_cache else None
        self.in_flight = InFlight(overlap)
        self.scheduler = Scheduler(
            self.layout, self.pool, self.prefixes, rounds_in_flight=2 if overlap else 1, vocab_size=self.vocab_size
        )
        self.inbox: list[Request] = []
        self.requests: dict[str, Request] = {}
        self.stopped: str | None = None
        self.observer: LaunchObserver | None = None

    def step(self) -> list[OutputChunk]:
        """Admit new requests, start the next launch, read a launch.  Returns the output chunks of this step."""
        with self._stop_on_error():
            self.scheduler.admit(self._drain_inbox())
            launch = self.scheduler.next_launch()  # a prefill pass, a round, or None
            started = (launch, self._start(launch)) if launch else None
            to_read = self.in_flight.exchange(started)  # with overlap the previous launch, in lock-step this one
            if to_read is None:
                return self._forget_finished(self.scheduler.take_chunks())
            launch, handle = to_read
            return self._forget_finished(self.scheduler.harvest(launch, self._result(handle)))

    def _start(self, launch: Launch) -> Handle:
        if self.observer is not None:
            self.observer.on_launch(launch.launch_input)
        if not launch.launch_input.is_staged:
            return self.executor.launch(launch.launch_input)
        handle = self.executor.launch_staged(launch.launch_input, partial(self.scheduler.of_beams, launch))
        # The host computes the masks while the device verifies the trees.
        handle.settle(self.scheduler.node_masks(launch, handle.trees()))
        return handle

    def _result(self, handle: Handle) -> list[RequestResult]:
        if self.observer is not None:
            self.observer.before_result(handle)
        return handle.result()

    def add(self, request: Request) -> None:
        """Queue a request.  Raises EspalierError, without any effect, for a request that can never run."""
        if self.stopped is not None:
            raise EspalierError(self.stopped)
        if request.id in self.requests:
            raise EspalierError(f"request {request.id!r} is running already; use another id")
        check_prompt(request.prompt, self.vocab_size, self.layout.max_context)
        end = request.end(self.layout.max_context)
        if len(request.prompt) + request.params.min_tokens > end:
            raise EspalierError(
                f"min_tokens={request.params.min_tokens} and the prompt ({len(request.prompt)} tokens) need more than "
                f"the {end} tokens that max_context and max_tokens allow; lower it, or raise max_context or max_tokens"
            )
        if not self.scheduler.fits(request):
            raise EspalierError(
                f"a request of up to {end} tokens (prompt: {len(request.prompt)}) can never fit into "
                f"{self.pool.num_pages - 1} pages of {self.layout.page_size} tokens; "
                "lower max_tokens or raise num_pages"
            )
        self.inbox.append(request)
        self.requests[request.id] = request

    def abort(self, request_id: str) -> None:
        """End a request at the next harvest.  An unknown or finished id is ignored: the request may just have ended."""
        request = self.requests.get(request_id)
        if request is not None and not request.aborted:
            self.scheduler.abort(request)

    @contextmanager
    def _stop_on_error(self) -> Iterator[None]:
        """Stop the engine and abort all requests on any error: a failed launch may leave device state half written."""
        try:
            yield
        except BaseException as error:
            self.stopped = f"the engine stopped ({type(error).__name__}: {error}); make another LLM"
            self.in_flight.unread = None
            self.scheduler.admit(self._drain_inbox())
            self.scheduler.stop(self.stopped)
            raise

    def _forget_finished(self, chunks: list[OutputChunk]) -> list[OutputChunk]:
        for chunk in chunks:
            if chunk.finish_reason is not None:
                del self.requests[chunk.request_id]
        return chunks

    def _drain_inbox(self) -> list[Request]:
        arrived, self.inbox = self.inbox, []
        return arrived

    @property
    def has_work(self) -> bool:
        return bool(self.inbox) or self.scheduler.has_work

    @property
    def totals(self) -> SpeculationStats:
        return self.scheduler.totals

    def check_pages(self) -> None:
        """Check that every page is either the dummy page, free, or held as often as it is counted.

        Raises PageDefect naming the page.
        """
        cached = self.prefixes.pages() if self.prefixes is not None else ()
        self.pool.check([r.pages for r in self.scheduler.running], cached)

    def close(self) -> None:
        """Free models, pages and graphs, even while somebody still holds a reference to the engine.  Idempotent."""
        if self.stopped is None:
            self.stopped = "the engine is closed; make another LLM"
        self.in_flight.unread = None
        try:
            self.executor.close()
        finally:
            self.executor = ClosedExecutor()
