"""The engine: `Engine.step` is one iteration of the main loop.

A step starts one launch (a prefill pass or a decode round) and reads the result of one launch.  With overlap, this is
the result of the launch that the previous step started, so the host works while the device runs the new launch.

A round with a grammar runs in stages.  The first stage needs no token mask, so it starts like every other round.  Once
the host has read the previous round's result, the host knows the states of the grammars and resumes the new round.
While the target verifies the trees, the host makes the token masks of the trees' nodes.  The last stage (settle) needs
these masks.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from espalier.cache.pages import PagePool
from espalier.cache.prefix_tree import PrefixTree
from espalier.engine.executor import ClosedExecutor, Executor, LaunchHandle, LaunchObserver, StagedRoundHandle
from espalier.engine.guesses import GuessSources
from espalier.engine.launch_input import Launch
from espalier.engine.masks import Maskers
from espalier.engine.round_trees import RoundTrees
from espalier.engine.scheduler import Scheduler
from espalier.engine.state_keeper import make_state_keeper
from espalier.engine.tree_choice import TreeChooser
from espalier.errors import EspalierError, output_too_long
from espalier.request import OutputChunk, Request, check_prompt
from espalier.speculate.sources.base import HostSource
from espalier.stats import SpeculationStats


@dataclass
class StartedLaunch:
    """A launch that the host has started and not read yet.  maskers: the grammars of a round in stages, set when the
    round is resumed; empty for other launches."""

    launch: Launch
    handle: LaunchHandle
    maskers: Maskers = ()

    @property
    def staged_handle(self) -> StagedRoundHandle | None:
        """The handle of a round that runs in stages; None for other launches."""
        return cast(StagedRoundHandle, self.handle) if self.launch.launch_input.is_staged else None


@dataclass
class LaunchesInFlight:
    """The launches that the host has started and not read yet.

    unread_launch: with overlap, the launch that the last step started.  Without overlap None, because a launch is read
    in the step that started it.
    unsettled_round: the round in stages that still waits for the token masks of its trees.  With overlap, this is the
    same object as `unread_launch`."""

    overlap: bool
    unread_launch: StartedLaunch | None = None
    unsettled_round: StartedLaunch | None = None

    def clear(self) -> None:
        self.unread_launch = self.unsettled_round = None


class Engine:
    """Runs requests until they finish.  Only one thread at a time may use it.  During a step, only `abort` may be
    called.

    requests: unfinished requests, by id.
    stop_error: the reason why the engine no longer runs; None while it runs.  If a launch fails, every request in the
    engine is aborted with this text.
    observer: is called for every launch; None by default.
    chooser: chooses the tree of each round; None to use the fixed tree of each batch size (RoundLayout.for_batch)."""

    def __init__(
        self,
        executor: Executor,
        overlap: bool,
        prefix_cache: bool,
        chooser: TreeChooser | None = None,
        sources: Sequence[HostSource] = (),
    ):
        runner = executor.runner
        self.layout = runner.layout
        self.vocab_size = runner.target.config.vocab_size
        self.max_position = runner.target.config.max_position
        self.executor = executor
        self.pool = PagePool(runner.pages.num_pages)
        self.prefix_tree = PrefixTree(self.pool, self.layout.page_size) if prefix_cache else None
        self.in_flight = LaunchesInFlight(overlap)
        self.scheduler = Scheduler(
            self.layout,
            self.pool,
            self.prefix_tree,
            rounds_in_flight=2 if overlap else 1,
            vocab_size=self.vocab_size,
            captured_passes=executor.captured_passes,
            state_keeper=make_state_keeper(self.layout, self.prefix_tree, runner.cache.snapshot_rows),
            round_trees=RoundTrees(self.layout, chooser, executor.runs_any_tree),
            guess_sources=GuessSources(self.layout, sources),
        )
        self.requests: dict[str, Request] = {}
        self.stop_error: str | None = None
        self.observer: LaunchObserver | None = None

    def step(self) -> list[OutputChunk]:
        """Starts the next launch and reads one result.  Returns the output chunks that the result gives."""
        with self._stop_on_error():
            # A round in stages uses buffers that every later launch overwrites, so its last stage must start first.
            self._settle_round()
            launch = self.scheduler.next_launch()  # a prefill pass, a round, or None
            if launch and self.observer is not None:
                self.observer.on_launch(launch.launch_input)
            started = StartedLaunch(launch, self.executor.launch(launch.launch_input)) if launch else None
            if self.in_flight.overlap:
                previous, self.in_flight.unread_launch = self.in_flight.unread_launch, started
                self._read_result(previous)
                self._resume_round(started)
            else:
                self._resume_round(started)
                self._settle_round()
                self._read_result(started)
            chunks = self.scheduler.pop_chunks()
            for chunk in chunks:
                if chunk.finish_reason is not None:
                    del self.requests[chunk.request_id]
            return chunks

    def drain(self) -> None:
        """Reads the result of the launch in flight.  Until the next step, nothing runs on the models.

        The next step returns the output chunks of that result.  Running requests keep their state."""
        with self._stop_on_error():
            self._settle_round()
            previous, self.in_flight.unread_launch = self.in_flight.unread_launch, None
            self._read_result(previous)

    def raise_rank_failure(self) -> None:
        """Raises the error of a failed rank.  This finds failures while no request runs and `step` is not called."""
        if self.executor.failure is not None:
            with self._stop_on_error():
                raise self.executor.failure

    def _read_result(self, started: StartedLaunch | None) -> None:
        """Waits for the result of a launch and hands it to the scheduler.  None: no launch is in flight."""
        if started is None:
            return
        if self.observer is not None:
            self.observer.before_result(started.handle)
        self.scheduler.process_results(started.launch, started.handle.result())

    def _resume_round(self, started: StartedLaunch | None) -> None:
        """Starts the propose and verify stages of a round.  The results of all earlier launches must have been read,
        because the states of the grammars follow from them."""
        if started is None or started.staged_handle is None:
            return
        masks, started.maskers = self.scheduler.mask_builder, self.scheduler.maskers_of(started.launch)
        started.staged_handle.resume(masks.guide_rows(started.maskers), partial(masks.beam_masks, started.maskers))
        self.in_flight.unsettled_round = started

    def _settle_round(self) -> None:
        started, self.in_flight.unsettled_round = self.in_flight.unsettled_round, None
        if started is not None and started.staged_handle is not None:
            trees = started.staged_handle.trees()
            # The host makes the masks while the device verifies the trees.
            started.staged_handle.settle(self.scheduler.mask_builder.node_masks(started.maskers, trees))

    def add(self, request: Request) -> None:
        """Adds a request to the queue.  Raises EspalierError, and changes nothing, if the request can never run."""
        if self.stop_error is not None:
            raise EspalierError(f"{self.stop_error}; make another LLM")
        if request.id in self.requests:
            raise EspalierError(f"request {request.id!r} is running already; use another id")
        max_context, min_tokens = self.layout.max_context, request.params.min_tokens
        check_prompt(request.prompt, self.vocab_size, max_context, self.max_position)
        if len(request.prompt) + min_tokens > max_context:
            raise output_too_long("min_tokens", min_tokens, len(request.prompt), max_context, self.max_position)
        if not self.scheduler.fits(request):
            raise EspalierError(
                f"a request of up to {request.max_num_tokens(max_context)} tokens (prompt: {len(request.prompt)}) can "
                f"never fit into {self.pool.num_pages - 1} pages of {self.layout.page_size} tokens; "
                "lower max_tokens or raise num_pages"
            )
        self.scheduler.waiting.add(request)
        self.requests[request.id] = request

    def abort(self, request_id: str) -> None:
        """Ends a request (see Scheduler.abort).  An unknown id is ignored, because the request may just have ended."""
        request = self.requests.get(request_id)
        if request is not None and not request.aborted:
            self.scheduler.abort(request)

    @contextmanager
    def _stop_on_error(self) -> Iterator[None]:
        """On any error, stops the engine and aborts all requests, because a failed launch may leave device state half
        written."""
        try:
            yield
        except BaseException as error:
            self.stop_error = f"the engine stopped ({type(error).__name__}: {error})"
            self.in_flight.clear()
            self.scheduler.abort_all(self.stop_error)
            raise

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def num_abandoned_grammars(self) -> int:
        """The number of grammars that took too long, and whose threads still run (mask_threads.py)."""
        return self.scheduler.mask_builder.threads.num_abandoned

    @property
    def totals(self) -> SpeculationStats:
        return self.scheduler.totals

    def close(self) -> None:
        """Frees models, pages and graphs, even if references to the engine remain.  Idempotent."""
        if self.stop_error is None:
            self.stop_error = "the engine is closed"
        self.in_flight.clear()
        try:
            self.executor.close()  # a launch in flight may still ask for masks
        finally:
            self.scheduler.mask_builder.close()
            closed: Any = ClosedExecutor()
            self.executor = closed
