"""Traffic as Hypothesis drives it: arrivals, steps, aborts, preemptions, evictions, pages taken away and given back.

What must hold is the same for a device of symbols and for real models; a subclass says which engine runs.
"""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from espalier.engine.engine import Engine
from espalier.errors import EspalierError
from espalier.request import OutputChunk, Request, SamplingParams
from tests.harness import VOCAB, request
from tests.pages import check_pages, check_pool

TRUNK = [(7 * i * i + 3 * i) % VOCAB for i in range(200)]

# A stretch of one trunk, then what is its own: prompts meet in the prefix tree and part at every place.
prompts = st.tuples(st.integers(0, 40), st.lists(st.integers(0, VOCAB - 1), max_size=6)).map(
    lambda parts: TRUNK[: parts[0]] + parts[1] or [1]
)
limits = st.one_of(st.integers(1, 24), st.none())
stops = st.lists(st.integers(0, VOCAB - 1), max_size=1)
asked_of_prompt = st.sampled_from([None, None, 0])


def pages_beyond(engine: Engine, r: Request) -> int:
    """Pages that r holds beyond R·(S + 1) + 1 tokens past its root, R being the rounds that may be in flight."""
    layout, rounds = engine.layout, 2 if engine.in_flight.overlap else 1
    ahead = r.num_known + rounds * (layout.steps + 1) + 1
    return len(r.pages) - -(-ahead // layout.page_size)


class Traffic(RuleBasedStateMachine):
    """Pages are conserved after every step, and what comes out is what a request alone would say."""

    engine: Engine

    def build(self, draw: st.DataObject) -> Engine:
        raise NotImplementedError

    def expected(self, r: Request) -> tuple[list[int], str]:
        """Tokens and finish_reason of the request alone, by plain decoding."""
        raise NotImplementedError

    def params(self, draw: st.DataObject) -> SamplingParams:
        return SamplingParams(
            temperature=0.0,
            max_tokens=draw.draw(limits),
            stop_token_ids=draw.draw(stops),
            prompt_logprobs=draw.draw(asked_of_prompt),
            speculation=draw.draw(st.sampled_from([None, False])),
        )

    @initialize(draw=st.data())
    def start(self, draw: st.DataObject) -> None:
        self.engine = self.build(draw)
        self.requests: list[Request] = []
        self.pieces: dict[str, list[OutputChunk]] = {}
        self.held: list[int] = []
        self.refused = 0

    @rule(prompt=prompts, draw=st.data())
    def arrive(self, prompt: list[int], draw: st.DataObject) -> None:
        """A request, or another sample of the last one's prompt."""
        leader = self.requests[-1] if self.requests and draw.draw(st.integers(0, 3)) == 0 else None
        r = request(len(self.requests) + self.refused, leader.prompt if leader else prompt, self.params(draw))
        r.prefix_leader = leader
        try:
            self.engine.add(r)
        except EspalierError:
            self.refused += 1
        else:
            self.requests.append(r)
            self.pieces[r.id] = []

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            for piece in self.engine.step():
                self.pieces[piece.request_id].append(piece)
            self.check_running()

    @precondition(lambda self: self.requests)
    @rule(draw=st.data())
    def abort(self, draw: st.DataObject) -> None:
        self.engine.abort(draw.draw(st.sampled_from(self.requests)).id)

    @precondition(lambda self: self.engine.scheduler.running and not self.engine.scheduler._launches_in_flight)
    @rule(draw=st.data())
    def preempt(self, draw: st.DataObject) -> None:
        self.engine.scheduler._preempt(draw.draw(st.sampled_from(self.engine.scheduler.running)))

    @rule(count=st.integers(1, 8))
    def evict(self, count: int) -> None:
        if self.engine.prefix_tree is not None:
            self.engine.prefix_tree.evict(count)

    @rule(count=st.integers(1, 30))
    def take_pages(self, count: int) -> None:
        """Somebody else holds pages for a while: the engine must evict, wait and preempt by itself."""
        self.held += self.engine.pool.allocate(min(count, self.engine.pool.num_free))

    @rule()
    def give_pages_back(self) -> None:
        self.engine.pool.release(self.held)
        self.held = []

    @invariant()
    def every_page_has_one_place(self) -> None:
        if not hasattr(self, "engine"):
            return
        cached = self.engine.prefix_tree.pages() if self.engine.prefix_tree is not None else ()
        check_pool(self.engine.pool, [*(r.pages for r in self.engine.scheduler.running), self.held], cached)

    def check_running(self) -> None:
        self.every_page_has_one_place()
        scheduler = self.engine.scheduler
        for r in scheduler.running:
            assert pages_beyond(self.engine, r) <= 0, "more pages than are ahead"
        arrivals = [r.arrival_index for r in scheduler.running]
        assert arrivals == sorted(arrivals)
        assert [r.arrival_index for r in scheduler.waiting] == sorted(r.arrival_index for r in scheduler.waiting)

    def run_dry(self) -> None:
        self.give_pages_back()
        steps = 0
        while self.engine.has_work:
            self.step(1)
            steps += 1
            assert steps < 4000, "the engine goes nowhere"

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        try:
            self.run_dry()
            self.check_end()
        finally:
            self.engine.close()

    def check_end(self) -> None:
        check_pages(self.engine)
        pool, prefixes = self.engine.pool, self.engine.prefix_tree
        assert pool.num_free + (0 if prefixes is None else len(prefixes)) + 1 == pool.num_pages
        assert sorted(self.engine.scheduler.free_slots) == list(range(1, self.engine.layout.num_slots))
        for r in self.requests:
            self.check_answer(r)

    def check_answer(self, r: Request) -> None:
        tokens, reason = self.expected(r)
        pieces = self.pieces[r.id]
        assert [t for piece in pieces for t in piece.token_ids] == r.output, "what was handed out"
        assert [f for piece in pieces for f in piece.from_draft] == r.from_draft
        assert len(r.from_draft) == len(r.output)
        known = [entry.token_id for entry in r.prompt_logprobs]
        asked = r.params.prompt_logprobs is not None
        assert known == r.prompt[1 : 1 + len(known)], "each position once, in order"
        assert len(known) == asked * (len(r.prompt) - 1) or (asked and not r.output)
        assert [piece.finish_reason for piece in pieces if piece.finish_reason] == [r.finish_reason]
        assert pieces[-1].finish_reason, "nothing comes after the end"
        if r.finish_reason == "abort":
            assert r.aborted
            assert r.output == tokens[: len(r.output)]
        else:
            assert (r.output, r.finish_reason) == (tokens, reason)
