"""A replayed graph and the same lines run eagerly leave the same bits: results, the slot table, committed K/V."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from espalier import LLM, SamplingParams
from espalier.engine.engine import Engine
from espalier.layout import PLAIN_TREE, TreeShape
from espalier.speculate import logit_slices
from tests.gpu.conftest import BATCHES
from tests.gpu.engines import DeviceSetup
from tests.gpu.traffic import mixed, run_staggered
from tests.gpu.twin import Twin, same_bits, twins
from tests.harness import VOCAB

pytestmark = pytest.mark.gpu

DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}
# (algorithm, page size): every page size under a draft, and the other drafters at two.
PAGES = [*product(["eagle3"], [1, 3, 16, 64, 256]), ("ngram", 3), ("ngram", 64), ("none", 1), ("none", 16)]

TREES = ((2, TreeShape(2, 3, 9)), (3, PLAIN_TREE), (4, TreeShape(3, 1, 4)), (5, TreeShape(1, 3, 3)))


def setup_of(algorithm: str, page_size: int, dtype: torch.dtype, **changes) -> DeviceSetup:
    setup = DeviceSetup(
        page_size=page_size,
        topk=3,
        steps=4,
        num_draft_tokens=17,
        max_batch=5,
        max_context=96,
        algorithm=algorithm,
        dtype=dtype,
        overlap=False,
        **changes,
    )
    return setup.plain() if algorithm == "none" else setup


def check(one: Engine, other: Engine, put_on_record, count: int = 13, **style) -> Twin:
    twin = twins(one, other)
    run_staggered(one, mixed(count, max_tokens=14, **style), every=2)
    put_on_record(BATCHES, {"replayed": {str(batch): rounds for batch, rounds in twin.replayed.items()}})
    return twin


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("algorithm", "page_size"), PAGES)
def test_every_launch_leaves_the_same_bits(algorithm, page_size, dtype, put_on_record):
    setup = setup_of(algorithm, page_size, DTYPES[dtype])
    twin = check(setup.engine(), setup.engine(), put_on_record)
    assert set(twin.replayed) == {1, 2, 3, 4, 5} and twin.num_passes > 0


@pytest.mark.parametrize("algorithm", ["eagle3", "ngram"])
def test_a_tree_of_its_own_for_each_batch(algorithm, put_on_record):
    setup = setup_of(algorithm, 16, torch.bfloat16, trees=TREES)
    twin = check(setup.engine(), setup.engine(), put_on_record)
    assert set(twin.replayed) == {1, 2, 3, 4, 5} and twin.num_passes > 0


@pytest.mark.parametrize("algorithm", ["eagle3", "ngram"])
def test_requests_that_never_speculate(algorithm, put_on_record):
    setup = setup_of(algorithm, 16, torch.bfloat16)
    one = setup.engine()
    twin = check(one, setup.engine(), put_on_record, speculation=False)
    assert set(twin.replayed) == {1, 2, 3, 4, 5} and twin.num_passes > 0
    assert list(one.scheduler.round_trees.num_rounds) == [setup.layout.tree_without_draft]


SOURCED = [
    {"num_text_paths": 2, "num_sent_paths": 2, "shared_rows": 3},
    {"shared_rows": 3},
    {"num_text_paths": 2, "drafts": False},
]


@pytest.mark.parametrize("changes", SOURCED, ids=["sources and shared rows", "shared rows", "without a draft pass"])
def test_scores_that_are_compared(changes, put_on_record):
    setup = setup_of("eagle3", 16, torch.bfloat16, **changes)
    twin = check(setup.engine(), setup.engine(), put_on_record)
    assert set(twin.replayed) == {1, 2, 3, 4, 5} and twin.num_passes > 0


@pytest.mark.parametrize("window", [None, 6])
def test_a_tree_of_three_words_and_a_small_draft_vocabulary(window, put_on_record):
    changes = {"draft_vocab": 11, "window": window, "family": "mistral" if window else "llama"}
    setup = setup_of("eagle3", 16, torch.bfloat16, **changes)
    setup = replace(setup, topk=8, steps=4, num_draft_tokens=129)
    check(setup.engine(), setup.engine(), put_on_record)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "phi3", "starcoder2"])
def test_models_by_transformers(family, put_on_record):
    """A class of transformers in a CUDA graph: nothing of it may read values on the host, or keep state."""
    setup = setup_of("eagle3", 16, torch.bfloat16, family=family, model_impl="transformers")
    twin = check(setup.engine(), setup.engine(), put_on_record)
    assert set(twin.replayed) == {1, 2, 3, 4, 5} and twin.num_passes > 0


@pytest.mark.parametrize("family", ["qwen3_next", "nemotron_h"])
def test_layers_that_keep_states(family, put_on_record):
    setup = setup_of("eagle3", 16, torch.bfloat16, family=family)
    twin = check(setup.engine(), setup.engine(), put_on_record)
    assert set(twin.replayed) == {1, 2, 3, 4, 5} and twin.num_passes > 0


@pytest.mark.parametrize("algorithm", ["eagle3", "ngram"])
def test_logits_of_nodes_in_pieces(algorithm, put_on_record, monkeypatch):
    """Seven rows at a time; the tokens are those of the whole."""
    setup = setup_of(algorithm, 16, torch.float32)

    def outputs() -> list[list[int]]:
        requests = mixed(13, max_tokens=14)
        run_staggered(setup.engine(), requests, every=3)
        return [request.output for request in requests]

    whole = outputs()
    monkeypatch.setattr(logit_slices, "MAX_NODE_LOGIT_BYTES", 7 * 4 * VOCAB)
    twin = check(setup.engine(), setup.engine(), put_on_record)
    assert set(twin.replayed) == {1, 2, 3, 4, 5} and twin.num_passes > 0
    assert outputs() == whole


def test_the_reference_backend_in_float64(put_on_record):
    setup = setup_of("eagle3", 3, torch.float64, attention="reference")
    check(setup.engine(), setup.engine(), put_on_record)


def test_with_the_next_round_launched_before_this_one_is_read(put_on_record):
    setup = setup_of("eagle3", 3, torch.bfloat16)
    setup = replace(setup, overlap=True)
    check(setup.engine(), setup.engine(), put_on_record)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_bundled_model_in_batches_of_every_size(dtype, put_on_record):
    """Sizes at which libraries split sums, unlike a tiny model's."""
    settings = {"device": "cuda", "dtype": dtype, "max_batch": 6, "max_context": 256, "num_pages": 128}
    with LLM("bundled", **settings) as llm, LLM("bundled", **settings) as other:
        twin = twins(llm.engine, other.engine)
        prompts = [[(7 * i * j + 3 * j) % 6000 + 4 for j in range(5 + 9 * i)] for i in range(8)]
        style = {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1, "ignore_eos": True}
        params = [SamplingParams(max_tokens=12 + 4 * i, **(style if i % 2 else {"temperature": 0.0})) for i in range(8)]
        llm.generate(prompts, params)
        put_on_record(BATCHES, {"replayed": {str(batch): rounds for batch, rounds in twin.replayed.items()}})
    assert len(twin.replayed) > 3


def test_bits_are_compared():
    nan, zero = torch.tensor([float("nan")]), torch.tensor([0.0])
    assert same_bits(nan, nan.clone()) and not same_bits(zero, -zero)
