"""The engine: one step, read from top to bottom."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from espalier.cache.pages import PagePool
from espalier.cache.prefix_tree import PrefixTree
from espalier.engine.executor import Closed, Executor, Handle, LaunchObserver
from espalier.engine.launch_input import Row
from espalier.engine.scheduler import Launch, Scheduler
from espalier.errors import EspalierError
from espalier.request import OutputChunk, Request, check_prompt
from espalier.stats import SpeculationStats


@dataclass
class InFlight:
    """What is launched and not yet read: with overlap one launch stays behind, in lock-step none."""

    overlap: bool
    behind: tuple[Launch, Handle] | None = None

    def exchange(self, launched: tuple[Launch, Handle] | None) -> tuple[Launch, Handle] | None:
        """Put a launch in; what is to be harvested comes out."""
        if not self.overlap or (launched is not None and launched[0].launch_input.is_staged):
            # Before a staged round the scheduler waits for what is behind.
            return launched
        before, self.behind = self.behind, launched
        return before


class Engine:
    """Runs requests to their end.  Not thread-safe: one caller adds, aborts and steps.

    requests: those that have not ended, by id.
    stopped: why nothing more runs, after a launch has failed; every request then in the engine is aborted with it.
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
        """One turn: take in what arrived, launch what comes next, hand out what is done."""
        with self._stopping_on_error():
            self.scheduler.admit(self._drain_inbox())
            launch = self.scheduler.next_launch()  # a prefill pass, a round, or nothing
            launched = (launch, self._launched(launch)) if launch else None
            done = self.in_flight.exchange(launched)  # overlap: the launch before; lock-step: this one
            if done is None:
                return self._hand_out(self.scheduler.take_pieces())
            harvest, handle = done
            return self._hand_out(self.scheduler.harvest(harvest, self._result(handle)))

    def _launched(self, launch: Launch) -> Handle:
        if self.observer is not None:
            self.observer.on_launch(launch.launch_input)
        if not launch.launch_input.is_staged:
            return self.executor.launch(launch.launch_input)
        handle = self.executor.launch_staged(launch.launch_input)
        # Masks are made while the device verifies the trees.
        handle.settle(self.scheduler.node_masks(launch, handle.trees()))
        return handle

    def _result(self, handle: Handle) -> list[Row]:
        if self.observer is not None:
            self.observer.before_result(handle)
        return handle.result()

    def add(self, request: Request) -> None:
        """Queue a request.  Raises EspalierError, before anything is lost, for one that can never run."""
        if self.stopped is not None:
            raise EspalierError(self.stopped)
        if request.id in self.requests:
            raise EspalierError(f"request {request.id!r} is running already; use another id")
        check_prompt(request.prompt, self.vocab_size, self.layout.max_context)
        end = request.end(self.layout.max_context)
        if len(request.prompt) + request.params.min_tokens > end:
            raise EspalierError(
                f"min_tokens={request.params.min_tokens} after a prompt of {len(request.prompt)} tokens passes the "
                f"{end} that max_context and max_tokens allow; lower it, or raise those"
            )
        if not self.scheduler.fits(request):
            raise EspalierError(
                f"a request of up to {end} tokens (prompt {len(request.prompt)}) can never fit "
                f"{self.pool.num_pages - 1} pages of {self.layout.page_size} tokens; "
                "lower max_tokens or raise num_pages"
            )
        self.inbox.append(request)
        self.requests[request.id] = request

    def abort(self, request_id: str) -> None:
        """End a request at the next harvest; unknown and finished ids are ignored, as an abort may cross a finish."""
        request = self.requests.get(request_id)
        if request is not None and not request.aborted:
            self.scheduler.abort(request)

    @contextmanager
    def _stopping_on_error(self) -> Iterator[None]:
        """What goes wrong in a launch leaves device state half written: no request can go on, and none may seem to."""
        try:
            yield
        except BaseException as error:
            self.stopped = f"the engine stopped ({type(error).__name__}: {error}); make another LLM"
            self.in_flight.behind = None
            self.scheduler.admit(self._drain_inbox())
            self.scheduler.stop(self.stopped)
            raise

    def _hand_out(self, pieces: list[OutputChunk]) -> list[OutputChunk]:
        for piece in pieces:
            if piece.finish_reason is not None:
                del self.requests[piece.request_id]
        return pieces

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
        """Assert that every page is exactly one of dummy, free, cached, owned.  Raises PageDefect naming the page."""
        cached = self.prefixes.pages() if self.prefixes is not None else ()
        self.pool.check([r.pages for r in self.scheduler.running], cached)

    def close(self) -> None:
        """Let go of models, pages and graphs, whoever still holds the engine.  Nothing runs any more.  Idempotent."""
        if self.stopped is None:
            self.stopped = "the engine is closed; make another LLM"
        self.in_flight.behind = None
        try:
            self.executor.close()
        finally:
            self.executor = Closed()
