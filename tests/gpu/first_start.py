"""Starts a tiny engine as `LLM` does, measured and captured, and answers requests of many forms; prints, as JSON, which
kernels were compiled, when, and whether ahead of their launch, and how many CUDA graphs were captured meanwhile.

A program of its own: kernels that are in memory are not compiled again.
"""

import argparse
import json
import logging
import threading
from typing import Any

import torch
import triton

from espalier.engine.cuda import CudaExecutor
from espalier.engine.engine import Engine
from espalier.layout import PLAIN_TREE, TreeShape
from espalier.request import Request
from espalier.startup.build import make_runner
from espalier.startup.measure_memory import TRIAL_PAGES, measure_launch_memory
from tests.gpu.engines import DeviceSetup
from tests.gpu.traffic import asked, mixed
from tests.grammar.test_lossless import asked as under_grammars
from tests.grammar.test_lossless import check_all_in_grammar
from tests.harness import prompts
from tests.pages import check_pages

DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
TREES = ((2, TreeShape(2, 2, 5)), (4, PLAIN_TREE))


def setup_of(algorithm: str, dtype: torch.dtype) -> DeviceSetup:
    setup = DeviceSetup(
        page_size=16,
        topk=3,
        steps=3,
        num_draft_tokens=12,
        max_batch=5,
        max_context=96,
        draft_vocab=11,
        algorithm=algorithm,
        dtype=dtype,
        trees=TREES,
        capture_stages=True,
    )
    return setup.plain() if algorithm == "none" else setup


def measured(setup: DeviceSetup) -> None:
    """A trial, as of espalier/startup/measure_memory.py."""
    round = make_runner(setup.loaded().with_num_pages(TRIAL_PAGES))
    trial = CudaExecutor(round, graph_batch=0, capture_stages=True)
    measure_launch_memory(trial, setup.layout, setup.device, graph_batch=setup.max_batch)


def answer(engine: Engine) -> list[Request]:
    """A lone prompt, its prefix again, a long prompt in chunks beside running requests, and many at once.  Then
    log-probabilities and grammars: alone, beside one free request, and all at once."""
    [lone, long] = prompts(3, (37, 70))
    alone = [asked(i, prompt, 14) for i, prompt in enumerate((lone, [*lone[:33], 5, 9]), 100)]
    one_token = asked(102, lone[:1], 14)
    together = mixed(7, max_tokens=14)
    late = asked(103, long, 14, temperature=0.0)
    for request in (*alone, one_token):
        engine.add(request)
        _run(engine)
    for count, request in enumerate((*together, late)):
        engine.add(request)
        if count % 4 == 3:
            engine.step()
            engine.step()
    _run(engine)
    reported = asked(104, long, 5, temperature=1.0, logprobs=3, prompt_logprobs=2)
    masked = under_grammars(7, 1.2, count=8)
    for group in ([reported], masked[:1], masked[1:3], masked[3:]):
        for request in group:
            engine.add(request)
        _run(engine)
    engine.close()
    check_all_in_grammar(7, masked)
    return [*alone, one_token, *together, late, reported]


def watched_compilations() -> list[tuple[str, bool]]:
    """Grows with each kernel that is compiled from now on, or read from Triton's cache: its name, and whether a thread
    of precompile() did it.  A launch compiles on its own thread.

    Triton 3.6 cannot call its other hook, jit_post_compile_hook, for kernels that take records."""
    compiled: list[tuple[str, bool]] = []

    def listen(src: Any, **_: Any) -> None:
        compiled.append((src.name, threading.current_thread().name.startswith("espalier-compile")))

    triton.knobs.compilation.listener = listen
    return compiled


def watched_captures() -> list[Any]:
    """Grows with each CUDA graph that is captured from now on."""
    captures, begin = [], torch.cuda.CUDAGraph.capture_begin

    def beginning(graph: torch.cuda.CUDAGraph, *args: Any, **kwargs: Any) -> None:
        captures.append(graph)
        begin(graph, *args, **kwargs)

    torch.cuda.CUDAGraph.capture_begin = beginning
    return captures


def _run(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
        check_pages(engine)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithm", choices=("eagle3", "ngram", "none"))
    parser.add_argument("dtype", choices=DTYPES)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    compiled = watched_compilations()
    setup = setup_of(args.algorithm, DTYPES[args.dtype])
    measured(setup)
    num_measured = len(compiled)
    engine = setup.engine()
    num_started = len(compiled)
    captures = watched_captures()
    requests = answer(engine)
    right = [setup.reference.plain(request).output(setup.max_context) for request in requests]
    found = {"measured": compiled[:num_measured], "captured": compiled[num_measured:num_started]}
    found |= {"served": compiled[num_started:], "captured_late": len(captures)}
    print(json.dumps(found | {"tokens": [request.output for request in requests], "right": right}))


if __name__ == "__main__":
    main()
