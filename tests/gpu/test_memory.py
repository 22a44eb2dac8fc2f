"""Pages that were measured to fit do fit, and what does not fit is refused before anything breaks."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from espalier import LLM, EspalierError, SamplingParams
from espalier.startup.measure_memory import MEMORY_MARGIN
from tests.gpu.conftest import FIGURES
from tests.pages import check_pages

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="takes all of a GPU's memory: make test-gpu"),
]

GIB = 2**30
MIB = 2**20


@contextmanager
def all_taken_but(left: int) -> Iterator[None]:
    """Somebody else holds the rest of the GPU's memory."""
    torch.cuda.empty_cache()
    taken = torch.empty(torch.cuda.mem_get_info()[0] - left, dtype=torch.uint8, device="cuda")
    try:
        yield
    finally:
        del taken
        torch.cuda.empty_cache()


def margin() -> int:
    return int(torch.cuda.mem_get_info()[1] * MEMORY_MARGIN)


def full(llm: LLM, prompt: int, logprobs: int | None = None) -> list[int]:
    """A full batch of long contexts, each to the context's end; how many tokens each said."""
    rows = [[(31 * i * j + 7 * j + i) % 6000 + 4 for j in range(prompt)] for i in range(llm.config.layout.max_batch)]
    outputs = llm.generate(rows, SamplingParams(temperature=0.0, ignore_eos=True, logprobs=logprobs))
    assert [output.finish_reason for output in outputs] == ["length"] * len(outputs)
    check_pages(llm.engine)
    return [len(output.token_ids) for output in outputs]


@pytest.mark.parametrize("graph_batch,chunk_size,logprobs", [("auto", 2048, None), (0, 2048, None), ("auto", 8192, 20)])
def test_pages_that_were_measured_hold_a_full_batch_of_long_contexts(graph_batch, chunk_size, logprobs, put_on_record):
    """Memory for fewer pages than the batch would like, so that the last page is used and more are missed."""
    before = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    settings = {"max_batch": 64, "max_context": 2048, "dtype": "float32", "graph_batch": graph_batch}
    settings["chunk_size"] = chunk_size
    with all_taken_but(margin() + 2 * GIB), LLM("bundled", device="cuda", **settings) as llm:
        layout, pages = llm.engine.layout, llm.config.num_pages
        assert layout.min_pages <= pages < layout.max_pages
        left = torch.cuda.mem_get_info()[0]
        said = full(llm, prompt=2048 - 40, logprobs=logprobs)
        least = torch.cuda.mem_get_info()[0]
        put_on_record(
            FIGURES,
            f"pages measured, graph_batch={graph_batch}, logprobs={logprobs}: {pages} of {layout.page_size} tokens "
            f"(a full batch would use {layout.max_pages}), {left / MIB:.0f} MiB left free, {least / MIB:.0f} MiB "
            f"after {sum(said)} tokens at the end of {len(said)} contexts of 2048, "
            f"{llm.engine.scheduler.num_preempted} preemptions; margin {margin() / MIB:.0f} MiB",
        )
        assert set(said) == {40}
        assert least >= margin() // 2
    assert torch.cuda.memory_stats()["num_alloc_retries"] == before, "an allocation failed and was tried again"


def test_a_context_that_does_not_fit_is_refused_by_name_and_a_shorter_one_runs():
    settings = {"device": "cuda", "dtype": "float64", "max_batch": 2, "chunk_size": 1024}
    with all_taken_but(margin() + 256 * MIB), pytest.raises(EspalierError, match=r"max_context=2048 needs \d+ pages"):
        LLM("bundled", max_context=2048, **settings)
    torch.cuda.empty_cache()
    with LLM("bundled", max_context=128, num_pages=64, **settings) as llm:
        assert full(llm, prompt=120) == [8, 8]


def test_an_llm_finds_what_the_one_before_it_let_go_of():
    """Nobody empties PyTorch's cache in between, as a user would not."""
    pages = []
    with all_taken_but(margin() + 2 * GIB):
        for _ in range(3):
            with LLM("bundled", device="cuda", dtype="float32", max_batch=64, max_context=2048) as llm:
                pages.append(llm.config.num_pages)
    assert min(pages) > 0.95 * max(pages), pages


def test_pages_that_are_asked_for_and_do_not_fit_are_refused_by_name():
    with all_taken_but(2 * GIB), pytest.raises(EspalierError, match=r"num_pages=1000000 .* needs"):
        LLM("bundled", device="cuda", num_pages=1_000_000)
