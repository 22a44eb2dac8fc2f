"""A small engine for compute-sanitizer: prompts of several chunks, eager rounds and, with --graphs, captured ones.

    run=tests/gpu/sanitize.py
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python $run
    compute-sanitizer --tool racecheck $(python $run --filters) python $run --graphs

Without PyTorch's cache every tensor is an allocation of its own, so that memcheck sees its ends; graphs need the cache.
The filters name this project's kernels: racecheck takes hours for all others, and breaks some of the libraries'.
Ends with an error where tokens are not the oracle's, or where the tool says so (give it --error-exitcode 1).
"""

import argparse
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import torch
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parents[2]))

import espalier.kernels
from espalier.request import Request
from tests.gpu.engines import DeviceSetup
from tests.gpu.traffic import STYLES, asked
from tests.harness import prompts, run

SETUP = DeviceSetup(
    page_size=4, topk=2, steps=3, num_draft_tokens=8, max_batch=3, max_context=64, chunk_size=16, draft_vocab=11
)
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "float64": torch.float64}


def traffic(tokens: int) -> list[Request]:
    """Greedy, sampled, and with every filter and penalty; the last prompt takes two chunks and follows the others."""
    given = zip(prompts(3, [3, 9, 21]), (STYLES[0], STYLES[1], STYLES[-1]), strict=True)
    return [asked(i, prompt, tokens, **style) for i, (prompt, style) in enumerate(given)]


def filters() -> str:
    """Options that name every kernel of the house, as Triton compiles it; what kernels call is part of them."""
    found = walk_packages(espalier.kernels.__path__, "espalier.kernels.")
    modules = [import_module(module.name) for module in found if not module.ispkg]
    kernels = [value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)]
    names = sorted({kernel.fn.__name__ for kernel in kernels if kernel.fn.__name__.endswith("_kernel")})
    return " ".join(f"--kernel-regex kne={name}" for name in names)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", action="store_true", help="capture rounds")
    parser.add_argument("--filters", action="store_true", help="print options for racecheck, and run nothing")
    parser.add_argument("--tokens", type=int, default=6, help="of each request")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--algorithm", choices=("eagle3", "ngram", "none"), default="eagle3")
    args = parser.parse_args()
    if args.filters:
        print(filters())
        return 0
    setup = replace(SETUP, dtype=DTYPES[args.dtype], algorithm=args.algorithm, graph_batch=None if args.graphs else 0)
    setup = setup.plain() if args.algorithm == "none" else setup
    ran = run(setup.engine(), traffic(args.tokens))
    right = [setup.reference.plain(r).output(setup.max_context) for r in ran.requests]
    is_right = ran.tokens == right or args.dtype == "bf16"
    verdict = "as the oracle says" if is_right else f"and the oracle says {right}"
    print(f"{args.algorithm} {args.dtype} {setup.backend}: {ran.tokens}, {verdict}")
    return not is_right


if __name__ == "__main__":
    sys.exit(main())
