"""`python -m lab bits`: in how many bits do ranks differ, in the hidden states and logits of an engine's rounds?

The engine itself compares tokens and log-probabilities.  Here every rank gathers the inputs and outputs of the target's
head in each pass, and counts differing bits on the device, also inside CUDA graphs.
"""

import random
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from espalier.config import EngineConfig, ResolvedConfig
from espalier.engine.ranks import OtherRanks
from espalier.errors import EspalierError
from espalier.llm import LLM, PreparedEngine, prepare_engine
from espalier.request import SamplingParams
from espalier.shards import Shards
from espalier.startup.build import LoadedModels
from espalier.startup.load import build_engine_of_ranks, load_rank_models_from_files
from espalier.startup.ranks import starting_ranks
from espalier.terminal.console import print_header, require_writable, stdout, write_json

# Greedy, sampled, filtered, and with log-probabilities: ranks exchange different tensors for each.
SAMPLING_STYLES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.9, "logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 1.1},
)
MAX_CONTEXT = 512


class BitCounter:
    """Counts differing bits.  counts: [2] int64 on the device, the number of passes and of differing bits."""

    def __init__(self, shards: Shards, device: torch.device) -> None:
        self.shards = shards
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)

    def add(self, *values: Tensor) -> None:
        """Count the bits in which these values of a pass differ from those of rank 0."""
        self.counts[0] += 1
        for each in values:
            of_ranks = self.shards.all_gather(each.contiguous().view(torch.uint8))
            differing = of_ranks[1:] ^ of_ranks[0]
            for bit in range(8):
                self.counts[1] += ((differing >> bit) & 1).sum()


@dataclass(frozen=True)
class BitCounts:
    passes: int
    differing_bits: int
    tokens: int


def load_counting_models(config: ResolvedConfig, shards: Shards) -> LoadedModels:
    """Returns one rank's models (startup/ranks.py:LoadRankModels).  The target's attribute `bits` is a BitCounter."""
    loaded = load_rank_models_from_files(config, shards)
    target: Any = loaded.target
    counter, right = BitCounter(shards, loaded.device), target.logits

    def logits(hidden: Tensor) -> Tensor:
        found: Tensor = right(hidden)
        counter.add(hidden, found)
        return found

    target.logits, target.bits = logits, counter
    return loaded


def count_bits(ranks: OtherRanks, prepared: PreparedEngine, passes: int) -> BitCounts:
    """Run batches of requests until the target has made this many passes."""
    engine, config = build_engine_of_ranks(ranks, prepared.resolved, None, load_counting_models)
    with LLM.from_engine(engine, config, prepared.inputs) as llm:
        target: Any = engine.executor.runner.target
        counts, tokens, draw = target.bits.counts, 0, random.Random(0)
        counts.zero_()  # captures and measurements have made passes too
        vocab, batch = target.config.vocab_size, 2 * config.layout.max_batch
        while int(counts[0]) < passes:
            prompts = [[draw.randrange(vocab) for _ in range(draw.randint(1, 40))] for _ in range(batch)]
            most = min(passes - int(counts[0]), MAX_CONTEXT // 2)
            styles = [
                SamplingParams(
                    **SAMPLING_STYLES[i % len(SAMPLING_STYLES)],
                    seed=draw.randrange(2**32),
                    max_tokens=most,
                    ignore_eos=True,
                )
                for i in range(batch)
            ]
            tokens += sum(len(output.token_ids) for output in llm.generate(prompts, styles))
        return BitCounts(int(counts[0]), int(counts[1]), tokens)


def run(args: Namespace) -> int:
    if args.ranks < 2 or args.passes < 1:
        raise EspalierError(f"--ranks={args.ranks} --passes={args.passes}: at least 2 ranks and 1 pass are compared")
    require_writable("--json", args.json)
    settings: dict[str, Any] = {"device": args.device, "max_batch": args.max_batch, "max_context": MAX_CONTEXT}
    prepared = prepare_engine(EngineConfig(model="bundled", tensor_parallel=args.ranks, **settings))
    print_header()
    with starting_ranks(args.ranks) as ranks:
        counted = count_bits(ranks, prepared, args.passes)
    stdout().print(
        f"{counted.passes} passes of {args.ranks} ranks, {counted.tokens} tokens: "
        f"{counted.differing_bits} bits of hidden states and logits differ"
    )
    write_json(args.json, {"ranks": args.ranks, **vars(counted)})
    return int(counted.differing_bits > 0)
