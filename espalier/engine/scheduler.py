"""The scheduler chooses the next launch, assigns slots and pages, and processes the results of launches.

The scheduler works on the host alone.  A request leaves its slot when it ends or is preempted.  This happens only while
results are processed, or while no launch is in flight.  Then the request's slot and pages are released, and its counter
`Request.generation` is increased by 1.  Results of launches with an older generation are dropped.
"""

from bisect import insort
from collections import Counter
from collections.abc import Callable

from espalier.attention import CommittedLengths
from espalier.cache.pages import PagePool
from espalier.cache.prefix_tree import PageBudget, PrefixTree
from espalier.engine.guesses import NO_GUESSES, GuessSources, SourceGuesses
from espalier.engine.launch_input import (
    NOT_FINITE_ERROR,
    Launch,
    LaunchInput,
    RequestResult,
    RoundTrace,
    prompt_rows_of,
    sampling_features_of,
    slot_init,
)
from espalier.engine.masks import MaskBuilder, Maskers
from espalier.engine.prefill_policy import (
    NO_PREFILL,
    PASS_OVERHEAD_ROWS,
    PrefillPass,
    is_prefill_next,
    next_prefill_pass,
    pieces_of,
)
from espalier.engine.queue import WaitingQueue
from espalier.engine.round_trees import RoundTrees
from espalier.engine.state_keeper import IntPairs, NoStateKeeper
from espalier.layout import LaunchForm, RoundLayout, TreeShape
from espalier.request import OutputChunk, Request
from espalier.sampling.prompt import PromptRows
from espalier.slots import SlotInit
from espalier.stats import SpeculationStats


class Scheduler:
    """Chooses launches and processes their results.

    rounds_in_flight: how many rounds may be launched and not read: 2 with overlap, else 1.
    captured_passes: the forms of prefill passes that are CUDA graphs (Executor).
    guess_sources: the sources that propose tokens beside the draft.
    num_rounds: how many rounds were launched, by batch size.  on_round: called with a RoundTrace for each request of
    each round; None by default."""

    def __init__(
        self,
        layout: RoundLayout,
        pool: PagePool,
        prefix_tree: PrefixTree | None,
        rounds_in_flight: int,
        vocab_size: int,
        captured_passes: tuple[LaunchForm, ...],
        round_trees: RoundTrees,
        state_keeper: NoStateKeeper,
        guess_sources: GuessSources,
    ):
        self.layout = layout
        self.round_trees = round_trees
        self.captured_passes = captured_passes
        self.mask_builder = MaskBuilder(vocab_size, layout.steps)
        self.pool = pool
        self.prefix_tree = prefix_tree
        self._page_budget = PageBudget(pool, prefix_tree)
        self.state_keeper = state_keeper
        self.guess_sources = guess_sources
        self.rounds_in_flight = rounds_in_flight
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self.free_slots = list(range(layout.max_batch, 0, -1))
        self.totals = SpeculationStats()
        self.on_round: Callable[[RoundTrace], None] | None = None
        self.num_preempted = 0
        self.num_rounds: Counter[int] = Counter()
        self._launches_in_flight = 0
        self._last_was_prefill = False
        # The rows that rounds since the last prefill pass would have run for the requests that wait for the next pass.
        self._idle_rows = 0.0
        self._output_chunks: list[OutputChunk] = []
        self._aborted_requests: list[Request] = []
        self._unfit_request: tuple[Request, int] | None = None
        self._slot_inits: list[SlotInit] = []
        self._appended_pages: list[tuple[int, int, int]] = []
        self._pages_to_clear: list[int] = []

    def abort(self, request: Request) -> None:
        """Ends a request when its next result is read, or before the next launch if it has no slot or nothing runs."""
        request.aborted = True
        self._aborted_requests.append(request)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self._launches_in_flight or self._output_chunks)

    def next_launch(self) -> Launch | None:
        """Returns a prefill pass or a round; None if a result must be read first, or if there is nothing to do."""
        self._drop_aborted()
        self._fill_slots()
        prefilling = [r for r in self.running if r.num_prefilled < r.prefill_len]
        prefilled = [r for r in self.running if r.num_prefilled >= r.prefill_len]
        decoding = [r for r in prefilled if not r.ends_in_flight(self.layout.max_context)]
        is_streamed = any(request.streamed for request in decoding)
        if is_prefill_next(self.layout, prefilling, decoding, is_streamed, self._last_was_prefill, self._idle_rows):
            return self._launch_prefill(prefilling, self.layout.max_pass_rows(is_streamed))
        batch = self._reserve_pages(decoding)
        return self._launch_round(batch) if batch else None

    def maskers_of(self, launch: Launch) -> Maskers:
        """Returns the masker of each request in a staged round; None for a request without a grammar, or that has left
        its slot since the launch.  All earlier results must have been processed."""
        return tuple(r.masker if generation == r.generation else None for r, generation, _ in launch.launched_requests)

    def process_results(self, launch: Launch, results: list[RequestResult]) -> None:
        """Processes the results of a launch.  Called in the order in which the launches were started."""
        self._launches_in_flight -= 1
        num_correct = self.guess_sources.count_correct_guesses(launch, results)
        max_depths = [0] * len(results)
        request_results = zip(launch.launched_requests, results, strict=True)
        for i, ((request, generation, is_prefilled), result) in enumerate(request_results):
            if generation != request.generation:
                continue
            if not launch.launch_input.is_prefill:
                max_depths[i] = self._read_round_result(request, result)
            elif self._read_prompt_logprobs(request, result) and is_prefilled:
                self._read_prefill_result(request, result)
            if request.aborted and not request.is_done:
                self._finish_request(request, "abort")
        self.round_trees.record(launch.launch_input, results, max_depths, num_correct)

    def abort_all(self, error: str) -> None:
        """Aborts every request with this error text, and forgets the launches in flight."""
        self._launches_in_flight = 0
        for request in (*self.waiting, *self.running):
            self._finish_request(request, "abort", error)
        self.waiting = WaitingQueue()

    def pop_chunks(self) -> list[OutputChunk]:
        chunks, self._output_chunks = self._output_chunks, []
        return chunks

    # Slots

    def fits(self, request: Request) -> bool:
        """Returns whether the pool has enough pages for the request at its greatest length, if no other has pages."""
        num_rows = request.max_num_tokens(self.layout.max_context) + self.rounds_in_flight - 1
        return self.layout.pages_for(num_rows) < self.pool.num_pages

    def _fill_slots(self) -> None:
        """Gives free slots to waiting requests, in queue order, until one does not fit."""
        skipped = []
        try:
            while self.free_slots and (request := self.waiting.peek()) is not None:
                if self._waits_for_sibling(request):
                    skipped.append(self.waiting.pop(gets_slot=False))
                elif self._enter_slot(request):
                    self.waiting.pop(gets_slot=True)
                else:
                    return
        finally:
            for entry in skipped:
                self.waiting.put_back(entry)

    def _waits_for_sibling(self, request: Request) -> bool:
        """Returns whether a request must wait for the pages of its prompt, which another sample is still computing."""
        leader = request.prefix_leader
        return self.prefix_tree is not None and leader is not None and not (leader.prompt_cached or leader.is_done)

    def _enter_slot(self, request: Request) -> bool:
        """Gives a waiting request a slot, and pages for its prompt and first rounds.  Returns False if too few pages
        can be freed."""
        if self._unfit_request == (request, self.pool.num_release_calls):
            return False  # no page was released since the last try
        tokens = request.tokens
        # The last token of a preempted request is its next root, whose row the next round computes.
        prefill_len = len(tokens) - 1 if request.output else len(tokens)
        has_draft_rows = self.round_trees.has_draft_rows(request)
        shared_pages = [] if self.prefix_tree is None else self.prefix_tree.match(tokens[:prefill_len], has_draft_rows)
        self.pool.share(shared_pages)
        end = request.max_num_tokens(self.layout.max_context)
        num_new_pages = self.layout.pages_needed(prefill_len, self.rounds_in_flight, end) - len(shared_pages)
        # Evict only if eviction frees enough pages.  Else cached pages would be lost and the request would still wait.
        if not (self._page_budget.could_free(num_new_pages) and self._page_budget.evict_until_free(num_new_pages)):
            self.pool.release(shared_pages)
            self._unfit_request = request, self.pool.num_release_calls
            return False
        request.pages = shared_pages + self.pool.allocate(num_new_pages)
        request.slot = self.free_slots.pop()
        num_cached = self.layout.tokens_in(len(shared_pages))
        # The draft's rows after the cached prefix read hidden states of the last cached rows.  Pages hold no hidden
        # states, so the last `num_recomputed_tokens` cached rows are computed again.
        start = max(0, min(num_cached - self.layout.num_recomputed_tokens, prefill_len - 1))
        if request.lacks_prompt_logprobs:
            # Cached pages hold no logits.  Rows whose log-probabilities are still missing are computed again.
            start = min(start, len(request.prompt_logprobs))
        request.prefill_len = request.num_known = prefill_len
        request.num_prefilled, num_hit = self.state_keeper.enter_slot(request, start, num_cached)
        request.rounds_in_flight = 0
        self.guess_sources.add_request(request)
        if not request.output:
            request.cached_tokens = num_hit
        insort(self.running, request, key=lambda r: r.queue_key)
        self._slot_inits.append(slot_init(request, tokens, request.num_prefilled, num_cached, end, self.layout.steps))
        return True

    # Pages

    def _reserve_pages(self, decoding: list[Request]) -> list[Request]:
        """Reserves pages for the tokens of one round, in queue order; if pages run out, preempts the last request.

        Returns the requests that can run; none if launches in flight must be read before a request can be preempted.
        """
        batch = []
        for request in decoding:
            while request.slot is not None and not self._extend_pages(request):
                if self._launches_in_flight:
                    return []
                self._preempt(self.running[-1])
            if request.slot is not None:
                batch.append(request)
        return batch

    def _extend_pages(self, request: Request) -> bool:
        """Allocates the pages that one more round may need.  Returns False if too few pages can be freed."""
        end = request.max_num_tokens(self.layout.max_context)
        num_new = self.layout.pages_needed(request.num_known, request.rounds_in_flight + 1, end) - len(request.pages)
        if num_new <= 0:
            return True
        if not self._page_budget.evict_until_free(num_new):
            return False
        assert request.slot is not None
        for page in self.pool.allocate(num_new):
            self._appended_pages.append((request.slot, len(request.pages), page))
            request.pages.append(page)
        return True

    # Launches

    def _launch_prefill(self, prefilling: list[Request], max_pass_rows: int) -> Launch:
        tokens_left = [*map(self.state_keeper.max_prefill_tokens, prefilling)]
        prefill = next_prefill_pass(self.layout, tokens_left, max_pass_rows, self.captured_passes)
        batch, pieces = prefilling[: len(prefill.lengths)], pieces_of(prefill)
        starts = pieces or [(r, 0) for r in range(len(batch))]
        committed_lengths = CommittedLengths(tuple(batch[r].num_prefilled + offset for r, offset in starts), exact=True)
        prompt_rows = prompt_rows_of(batch, prefill)
        snapshots = self.state_keeper.snapshots_of_pass(batch, prefill.lengths)
        for request, length in zip(batch, prefill.lengths, strict=True):
            request.num_prefilled += length
        self._last_was_prefill, self._idle_rows = True, 0.0
        tree = self.round_trees.tree_of_pass(batch)
        return self._launch(batch, committed_lengths, snapshots, tree, prefill, pieces, prompt_rows)

    def _launch_round(self, batch: list[Request]) -> Launch:
        max_committed = tuple(self.layout.max_committed_rows(r.num_known, r.rounds_in_flight) for r in batch)
        committed_lengths = CommittedLengths(max_committed, exact=not any(r.rounds_in_flight for r in batch))
        snapshots, guesses = self.state_keeper.snapshots_of_round(batch), self.guess_sources.ask_sources(batch)
        for request in batch:
            request.rounds_in_flight += 1
        self._last_was_prefill = False
        tree = self.round_trees.next_tree(batch, guesses.lookup_gain)
        num_rows = PASS_OVERHEAD_ROWS + self.round_trees.num_verified_rows(tree, len(batch))
        self._idle_rows += num_rows * sum(r.num_prefilled < r.prefill_len for r in self.running) / len(batch)
        self.num_rounds[len(batch)] += 1
        return self._launch(batch, committed_lengths, snapshots, tree, guesses=guesses)

    def _launch(
        self,
        batch: list[Request],
        committed_lengths: CommittedLengths,
        snapshots: IntPairs,
        tree: TreeShape | None,
        prefill: PrefillPass = NO_PREFILL,
        pieces: IntPairs = (),
        prompt_rows: PromptRows | None = None,
        guesses: SourceGuesses = NO_GUESSES,
    ) -> Launch:
        # A request with a new slot needs a prefill pass first, which takes slot inits.  A round has a fixed form.
        slot_inits, self._slot_inits = (self._slot_inits, []) if prefill.width else ([], self._slot_inits)
        launch_input = LaunchInput(
            slots=tuple(r.slot for r in batch if r.slot is not None),
            sampling_features=sampling_features_of(batch),
            num_logprobs=tuple(r.params.logprobs for r in batch),
            lengths=prefill.lengths,
            width=prefill.width,
            pieces=pieces,
            slot_inits=tuple(slot_inits),
            appended_pages=tuple(self._appended_pages),
            cleared_pages=tuple(self._pages_to_clear),
            reports_trees=self.on_round is not None,
            prompt_rows=prompt_rows,
            tree=tree,
            is_staged=not prefill.width and any(r.masker for r in batch),
            masks=self.mask_builder.prompt_masks(batch) if prefill.width else None,
            state_copies=self.state_keeper.take_state_copies(),
            snapshots=snapshots,
            **self.guess_sources.launch_fields(batch, guesses, tree)._asdict(),
            committed_lengths=committed_lengths,
        )
        self._appended_pages, self._pages_to_clear = [], []
        self._launches_in_flight += 1
        launched_requests = [(r, r.generation, r.num_prefilled >= r.prefill_len) for r in batch]
        return Launch(launch_input, launched_requests, guesses.guesses_by_slot)

    # Results

    def _read_prompt_logprobs(self, request: Request, result: RequestResult) -> bool:
        """Appends the prompt log-probabilities of a pass.  Returns False if one is NaN, which ends the request."""
        rows = result.prompt_logprobs
        if rows is not None and request.prompt_logprobs.add(rows).has_nan:
            self._finish_request(request, "abort", NOT_FINITE_ERROR)
        return not request.is_done

    def _read_prefill_result(self, request: Request, result: RequestResult) -> None:
        if result.is_finite:
            self._cache_pages(request, request.prefill_len)
            request.prompt_cached = True
            if request.params.max_tokens == 0:
                self._finish_request(request, "length")
            elif result.tokens:
                self._append_tokens(request, result, [False])
        else:
            self._finish_request(request, "abort", self.mask_builder.why_no_token(request.masker) or NOT_FINITE_ERROR)

    def _read_round_result(self, request: Request, result: RequestResult) -> int:
        """Processes a round's result for one request.  Returns the greatest depth at which it could accept nodes."""
        request.rounds_in_flight -= 1
        prefix_len, pages = request.num_known, request.pages
        request.num_known += len(result.tokens)
        # The last token is the target's own, unless its logits are not finite.  The others are the draft's.
        num_accepted = len(result.tokens) - 1 if result.is_finite else len(result.tokens)
        num_kept = self._append_tokens(request, result, [at < num_accepted for at in range(len(result.tokens))])
        if not request.is_done:
            self.state_keeper.on_decoded(request)
        if not result.is_finite and not request.is_done:
            self._finish_request(request, "abort", self.mask_builder.why_no_token(request.masker) or NOT_FINITE_ERROR)
        max_accept_depth = self.layout.max_accept_depth(request.max_num_tokens(self.layout.max_context), prefix_len)
        max_depth = min(request.params.depth_limit(self.layout.steps), max(max_accept_depth, 0))
        depth = min(max_depth, result.tree_size.depth)
        if num_kept:
            for stats in (request.stats, self.totals):
                # The tree may have nodes deeper than this request allows, because all trees of a batch have one shape.
                stats.add(num_kept, min(num_kept, num_accepted), result.tree_size.num_tokens_to_depth(depth), depth)
        if self.on_round is not None and result.tree is not None:
            size = self.layout.page_size
            self.on_round(RoundTrace(request.id, result.tree, prefix_len, result.tokens, [*pages], size))
        return max_depth

    def _append_tokens(self, request: Request, result: RequestResult, are_from_draft: list[bool]) -> int:
        """Appends the result's tokens to the request until one ends it.  Returns the number of appended tokens."""
        reason, num_kept, max_num_tokens = None, 0, request.max_num_tokens(self.layout.max_context)
        prompt_logprobs = None if request.output else request.prompt_logprobs_to_report
        for token in result.tokens:
            reason, num_kept = self._push_token(request, token, max_num_tokens), num_kept + 1
            if reason:
                break
        request.from_draft += are_from_draft[:num_kept]
        self.guess_sources.add_tokens(request, result.tokens[:num_kept])
        logprobs = None if result.logprobs is None else request.logprobs.add(result.logprobs[:num_kept])
        text = request.detokenizer.take_text(final=reason is not None) if request.detokenizer else ""
        if reason:
            self._set_finished(request, reason)
        if num_kept:
            content = (result.tokens[:num_kept], text, are_from_draft[:num_kept], logprobs, prompt_logprobs)
            self._output_chunks.append(OutputChunk(request.id, request.index, *content, reason, request.stop_reason))
        return num_kept

    def _push_token(self, request: Request, token: int, max_num_tokens: int) -> str | None:
        """Appends one token.  Returns the finish reason if this token ends the request, else None."""
        request.output.append(token)
        if request.masker is not None:
            request.masker.push(token)
        params, is_stop_token = request.params, token in request.stop_ids
        # A stop token adds no text, unless include_stop_str_in_output is set.
        text = None if is_stop_token and not params.include_stop_str_in_output else request.detokenizer
        stop_string = text.push_token(token) if text is not None else None
        if is_stop_token or stop_string is not None:
            request.stop_reason = stop_string or (None if token in params.eos_token_ids else token)
            return "stop"
        return "length" if request.num_tokens >= max_num_tokens else None

    # Ended and preempted requests

    def _drop_aborted(self) -> None:
        """Finishes aborted requests that have no slot, and, if no launch is in flight, those that have a slot."""
        # The list is replaced before it is read, so a call of `abort` during this method goes to the new list.
        aborted, self._aborted_requests = self._aborted_requests, []
        for request in aborted:
            if request.is_done:
                continue
            if request.slot is None:
                self.waiting.remove(request)
            elif self._launches_in_flight:
                self._aborted_requests.append(request)
                continue
            self._finish_request(request, "abort")

    def _finish_request(self, request: Request, reason: str, error: str | None = None) -> None:
        request.error = error
        text = request.detokenizer.take_text(final=True) if request.detokenizer else ""
        self._set_finished(request, reason)
        report = None if request.output else request.prompt_logprobs_to_report
        chunk = OutputChunk(
            request.id, request.index, text=text, prompt_logprobs=report, finish_reason=reason, error=error
        )
        self._output_chunks.append(chunk)

    def _set_finished(self, request: Request, reason: str) -> None:
        request.finish_reason = reason
        if request.slot is not None:
            self._release_slot(request)
        self.guess_sources.remove_request(request)

    def _preempt(self, request: Request) -> None:
        """Puts a running request back into the queue, with its tokens.  Its full pages stay in the prefix cache."""
        self.num_preempted += 1
        self._release_slot(request)
        self.waiting.add(request)

    def _release_slot(self, request: Request) -> None:
        assert request.slot is not None
        if request.error is None and request.num_known > request.prefill_len:
            # The rows of the prefill were inserted when its result was read.  Rounds have added more rows since then.
            self._cache_pages(request, min(request.num_known, request.num_tokens))
        self.state_keeper.on_slot_released(request)
        self.pool.release(request.pages)
        if request.error == NOT_FINITE_ERROR:
            # Free pages must hold no NaN: a library may multiply old rows by zero, and zero times NaN is NaN.
            self._pages_to_clear += filter(self.pool.is_free, request.pages)
        # Updates that were not launched yet must not reach the next owner of the slot.
        self._slot_inits = [slot_init for slot_init in self._slot_inits if slot_init.slot != request.slot]
        self._appended_pages = [entry for entry in self._appended_pages if entry[0] != request.slot]
        self.free_slots.append(request.slot)
        self.running.remove(request)
        request.slot, request.pages = None, []
        request.generation += 1

    def _cache_pages(self, request: Request, num_rows: int) -> None:
        """Inserts full pages of the request's first `num_rows` rows into the prefix tree.  Later rows may change."""
        if self.prefix_tree is not None:
            num_full = self.layout.num_full_pages(num_rows)
            tokens = request.tokens[: self.layout.tokens_in(num_full)]
            self.prefix_tree.insert(tokens, request.pages[:num_full], self.round_trees.has_draft_rows(request))
            self.state_keeper.on_pages_cached(request, len(tokens))
