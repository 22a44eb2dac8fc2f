"""A model that gives NaN for one token: who meets it fails by name, its mates go on, and nobody finds its pages."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from espalier.engine.engine import Engine
from espalier.models import CausalLM, DraftModel, load_target
from espalier.request import Request, SamplingParams
from espalier.startup.build import LoadedModels, assemble_engine
from tests.builders import make_eagle3, make_target
from tests.checkpoints import load_pair
from tests.engine.alone import replace_request
from tests.folders import new_folder
from tests.harness import CPU, DTYPE, MAX_POSITIONS, Setup, prompts, request
from tests.pages import check_pages
from tests.pairwise import fewer, product_params

BROKEN = 13
each_loop = pytest.mark.parametrize("overlap", [False, True], ids=["lockstep", "overlap"])


@cache
def directories(drafts_it: bool) -> tuple[Path, Path]:
    """A target whose embedding of one token is NaN, and a draft that knows that token or does not."""
    root = new_folder("nan-")
    target = make_target(root / "target", vocab=16)
    weights = load_file(target / "model.safetensors")
    weights["model.embed_tokens.weight"][BROKEN] = torch.nan
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    draft = make_eagle3(root / "draft", target, seed=1, draft_vocab=None if drafts_it else 15)
    if not drafts_it:
        narrow = load_file(draft / "model.safetensors")
        known = torch.tensor([token for token in range(16) if token != BROKEN])
        narrow["d2t"] = known - torch.arange(15)
        narrow["t2d"] = torch.tensor([token != BROKEN for token in range(16)])
        save_file(narrow, draft / "model.safetensors")
    return target, draft


@cache
def models(drafts_it: bool, algorithm: str) -> tuple[CausalLM, DraftModel | None]:
    target_path, draft_path = directories(drafts_it)
    how = {"dtype": DTYPE, "device": CPU, "position_rows": MAX_POSITIONS}
    if algorithm != "eagle3":
        return load_target(target_path, **how), None
    return load_pair(target_path, draft_path, **how)


def make_engine(setup: Setup, drafts_it: bool) -> Engine:
    return assemble_engine(LoadedModels(setup.config(), *models(drafts_it, setup.algorithm)))


@cache
def plain_engine() -> Engine:
    return make_engine(Setup(max_batch=1, prefix_cache=False).plain(), False)


def plainly(r: Request) -> Request:
    key = (tuple(r.prompt), repr(r.params), r.seed)
    if key not in _said:
        _said[key] = replace_request(r)
        engine = plain_engine()
        engine.add(_said[key])
        while engine.has_work:
            engine.step()
    return _said[key]


_said: dict[tuple, Request] = {}


def mates_and_victims() -> list[Request]:
    """Prompts with the broken token at their start, middle and end, and prompts without it."""
    num_finite = [[t for t in p if t != BROKEN] or [1] for p in prompts(31, (4, 20, 35, 12, 50, 17, 9, 28))]
    asked = [
        [BROKEN, *num_finite[0]],
        num_finite[1],
        [*num_finite[2], BROKEN],
        num_finite[3],
        [*num_finite[4][:20], BROKEN, *num_finite[4][20:]],
    ]
    wishes = [SamplingParams(temperature=i % 2, max_tokens=12) for i in range(8)]
    return [request(i, p, w) for i, (p, w) in enumerate(zip([*asked, *num_finite[5:]], wishes, strict=True))]


def nothing_broken_is_cached(engine: Engine) -> None:
    pages = engine.executor.runner.pages
    assert engine.prefix_tree is not None
    for page, node in engine.prefix_tree._nodes.items():
        begins = node.parent is engine.prefix_tree._root
        for stacks, first in ((pages.target_stacks, 0), (pages.draft_stacks, int(begins))):
            # The draft's row of a sequence's first token does not exist: there the last owner's stands.
            rows = slice(page * pages.page_size + first, (page + 1) * pages.page_size)
            for plane in (each for stack in stacks for each in stack.planes):
                assert plane[:, rows].isfinite().all(), f"page {page} of the prefix tree holds NaN"


def nothing_broken_is_free(engine: Engine) -> None:
    """A launch clears the free pages of requests that were not finite."""
    engine.add(request(99, [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=1)))
    while engine.has_work:
        engine.step()
    pages = engine.executor.runner.pages
    free = [page for page in range(1, pages.num_pages) if not engine.scheduler.pool.reference_count(page)]
    for plane in (each for stack in (*pages.target_stacks, *pages.draft_stacks) for each in stack.planes):
        rows = plane.unflatten(1, (pages.num_pages, pages.page_size))[:, free]
        assert rows.isfinite().all()


@pytest.mark.parametrize(
    ("page_size", "overlap", "drafts_it", "steps"),
    fewer(
        product_params([1, 3, 16], [False, True], [False, True], [3, 0]),
        lambda *cell: cell in ((3, False, True, 3), (16, True, False, 0)),
    ),
)
def test_fails_by_name_and_alone(page_size: int, overlap: bool, drafts_it: bool, steps: int) -> None:
    setup = Setup(page_size=page_size, overlap=overlap, chunk_size=16, num_pages=1 + 120 // page_size + 20)
    setup = replace(setup, steps=3, topk=4, num_draft_tokens=12) if steps else setup.plain()
    engine = make_engine(setup, drafts_it)
    requests = mates_and_victims()
    pieces = []
    for again in range(2):
        batch = requests if not again else [replace_request(r) for r in requests]
        for r in batch:
            engine.add(r)
        while engine.has_work:
            pieces += engine.step()
            check_pages(engine)
            nothing_broken_is_cached(engine)
        for r in batch:
            said = plainly(r)
            if drafts_it and r.error:
                # A masked row of NaN is NaN in the sum: who merely drafted the token fails too, and says nothing else.
                assert r.output == said.output[: len(r.output)]
            else:
                assert (r.output, r.finish_reason, r.error) == (said.output, said.finish_reason, said.error)
            if BROKEN in r.prompt:
                assert (r.output, r.finish_reason) == ([], "abort")
                assert r.error is not None
                assert "not finite" in r.error
                assert "\n" not in r.error
    assert {r.finish_reason for r in requests} == {"abort", "length"} or drafts_it
    nothing_broken_is_free(engine)
    named = {piece.request_id for piece in pieces if piece.error}
    assert named == {r.id for r in requests if r.error}
    engine.close()


@each_loop
def test_a_broken_token_that_is_emitted(overlap: bool) -> None:
    """It is picked from sound logits and stands; what would follow it fails.  As a stop token it is as good as any."""
    setup = Setup(page_size=2, overlap=overlap, steps=3, topk=4, num_draft_tokens=12)
    bias = {BROKEN: 100.0}
    loud = SamplingParams(temperature=0.0, max_tokens=8, logit_bias=bias)
    ended = SamplingParams(temperature=0.0, max_tokens=8, logit_bias=bias, stop_token_ids=[BROKEN])
    quiet = SamplingParams(temperature=0.0, max_tokens=8, logit_bias={BROKEN: -100.0})
    requests = [request(i, p, w) for i, (p, w) in enumerate(zip([[1, 2, 3]] * 3, (loud, ended, quiet), strict=True))]
    engine = make_engine(setup, False)
    for r in requests:
        engine.add(r)
    while engine.has_work:
        engine.step()
        check_pages(engine)
        nothing_broken_is_cached(engine)
    assert [(r.output, r.finish_reason) for r in requests[:2]] == [([BROKEN], "abort"), ([BROKEN], "stop")]
    assert requests[1].error is None
    assert (requests[2].output, requests[2].finish_reason) == (plainly(requests[2]).output, "length")
