"""Any traffic over a device of symbols: rows are read where they were written, written once, and never while they are
shared."""

from random import Random

from hypothesis import settings
from hypothesis import strategies as st

from espalier.engine.engine import Engine
from espalier.layout import RoundLayout, max_draft_tokens
from espalier.request import Request
from tests.engine.symbolic import SymbolicDevice, continuation, symbolic_engine
from tests.engine.traffic import Traffic


@st.composite
def layouts(draw: st.DrawFn) -> RoundLayout:
    steps, topk = draw(st.sampled_from([(0, 1), (1, 1), (1, 3), (3, 1), (3, 2), (5, 8)]))
    return RoundLayout(
        max_batch=draw(st.integers(1, 5)),
        steps=steps,
        topk=topk,
        num_draft_tokens=min(8, max_draft_tokens(steps, topk)),
        page_size=draw(st.sampled_from([1, 2, 3, 4, 16, 64])),
        max_context=draw(st.sampled_from([48, 64, 79])),
        num_recomputed_tokens=draw(st.sampled_from([0, 1])) if steps else 0,
        chunk_size=draw(st.sampled_from([16, 24, 64])),
    )


class SymbolicTraffic(Traffic):
    poison: int | None = None

    def build(self, draw: st.DataObject) -> Engine:
        layout = draw.draw(layouts())
        overlap = draw.draw(st.booleans())
        most = layout.pages_for(layout.max_context + 1)
        pages = 1 + draw.draw(st.integers(most, (layout.max_batch + 1) * most))
        random = Random(draw.draw(st.integers(0, 99)))
        return symbolic_engine(layout, pages, overlap, draw.draw(st.booleans()), random, self.poison)

    def expected(self, r: Request) -> tuple[list[int], str]:
        return continuation(r, self.engine.layout.max_context)


class PoisonedTraffic(SymbolicTraffic):
    """Rows at and after one token are NaN: the request fails, by name, and nobody ever meets its pages."""

    poison = 5

    def check_running(self) -> None:
        super().check_running()
        device = self.engine.executor
        assert isinstance(device, SymbolicDevice)
        if self.engine.prefix_tree is not None:
            assert not device.poisoned & set(self.engine.prefix_tree.pages()), "NaN in the prefix tree"

    def check_answer(self, r: Request) -> None:
        tokens, _ = self.expected(r)
        known = r.prompt + tokens
        doomed = self.poison in known[:-1]
        if not doomed or r.aborted:
            super().check_answer(r)
            return
        num_finite = tokens[: max(0, known.index(self.poison) + 1 - len(r.prompt))]
        assert r.finish_reason == "abort"
        assert r.error is not None
        assert "not finite" in r.error
        assert r.output == num_finite, "what was picked before it stands, however many came in one round"


TestSymbolicTraffic = SymbolicTraffic.TestCase
TestSymbolicTraffic.settings = settings(max_examples=25, stateful_step_count=50)
TestPoisonedTraffic = PoisonedTraffic.TestCase
TestPoisonedTraffic.settings = settings(max_examples=12, stateful_step_count=40)
