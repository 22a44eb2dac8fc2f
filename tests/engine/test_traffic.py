"""Any traffic over real models: what comes out is what plain decoding of the request alone says, and its draft tokens
are those of its tree alone."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st

from espalier.engine.engine import Engine
from espalier.request import Request, SamplingParams
from tests.engine.alone import alone, plainly
from tests.engine.traffic import Traffic, limits, stops
from tests.harness import Setup

cells = st.sampled_from(
    [
        {"steps": 3, "topk": 2, "num_draft_tokens": 8},
        {"steps": 5, "topk": 8, "num_draft_tokens": 64},
        {"steps": 1, "topk": 4, "num_draft_tokens": 5},
        {"steps": 3, "topk": 1, "num_draft_tokens": 4},
        {"steps": 3, "topk": 3, "num_draft_tokens": 9, "family": "mistral", "window": 6, "draft_vocab": 11},
        {"steps": 0, "topk": 1, "num_draft_tokens": 1, "algorithm": "none"},
        {"steps": 3, "topk": 2, "num_draft_tokens": 6, "algorithm": "ngram"},
    ]
)
wishes = st.sampled_from(
    [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5, "min_p": 0.02},
        {"temperature": 1.0, "top_p": 0.8, "presence_penalty": 0.5},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
        {"logit_bias": {3: -100.0, 5: 0.7}},
        {"min_tokens": 5},
        {"speculation": False},
        {"max_draft_depth": 1, "logprobs": 2},
        {"prompt_logprobs": 2},
    ]
)


class ModelTraffic(Traffic):
    def build(self, draw: st.DataObject) -> Engine:
        self.setup_ = Setup(
            page_size=draw.draw(st.sampled_from([1, 2, 3, 16])),
            max_batch=draw.draw(st.integers(1, 4)),
            max_context=48,
            chunk_size=draw.draw(st.sampled_from([16, 64])),
            overlap=draw.draw(st.booleans()),
            prefix_cache=draw.draw(st.booleans()),
            **draw.draw(cells),
        )
        most = self.setup_.layout.pages_for(self.setup_.max_context + 1)
        pages = 1 + draw.draw(st.integers(most, (self.setup_.max_batch + 1) * most))
        self.setup_ = Setup(**{**vars(self.setup_), "num_pages": pages})
        return self.setup_.engine()

    def params(self, draw: st.DataObject) -> SamplingParams:
        chosen = {"temperature": 0.0, "max_tokens": draw.draw(limits), **draw.draw(wishes)}
        if chosen["max_tokens"] is not None:
            chosen["min_tokens"] = min(chosen.get("min_tokens", 0), chosen["max_tokens"])
        return SamplingParams(stop_token_ids=draw.draw(stops), **chosen)

    def expected(self, r: Request) -> tuple[list[int], str]:
        said = plainly(self.setup_, r)
        assert said.reason is not None
        return said.tokens, said.reason

    def check_answer(self, r: Request) -> None:
        super().check_answer(r)
        assert r.from_draft == alone(self.setup_, r).from_draft[: len(r.output)], "another tree than the request's own"
        assert len(r.logprobs) == (0 if r.params.logprobs is None else len(r.output))


TestTraffic = ModelTraffic.TestCase
TestTraffic.settings = settings(max_examples=4, stateful_step_count=30)


@pytest.mark.full
class TestMuchTraffic(ModelTraffic.TestCase):
    settings = settings(max_examples=400, stateful_step_count=60)
