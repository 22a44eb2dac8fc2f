"""`python -m lab grammar`: the costs and benefits of grammars.

Host time of a round's masks, time between the tokens of requests beside one with a grammar, and tokens a second under a
JSON schema, with the tree and plain.  With --schemas, a model from files generates a value of each of many random JSON
schemas: valid or not, equal with speculation or not, and the accept length with and without what the draft is told.
"""

import json
import random
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from espalier.bench.drive import BenchEngine, variants_to_compare
from espalier.engine.masks import MaskBuilder
from espalier.errors import EspalierError
from espalier.grammar import Grammar
from espalier.grammar.tag import check_grammar
from espalier.llm import LLM
from espalier.masking.compile import compile_with_xgrammar, token_bytes
from espalier.masking.masker import GrammarMasker, allowed_tokens
from espalier.request import Output, SamplingParams
from espalier.terminal.console import print_table, progress, write_json
from espalier.terminal.flags import require_at_least_one
from espalier.text import TokenBytes
from lab.bench.engines import engine_report, engines_of_flags, load_sizes
from lab.bench.schemas import random_schema
from lab.bench.synthetic_vocabulary import synthetic_vocabulary

# (nodes of a tree, requests) whose masks are timed.
MASK_SIZES = ((16, 8), (64, 1))
NUM_REQUESTS, PROMPT_TOKENS = 8, 256
MASK_REPEATS = 9
# Timed runs of a load, after one that is not timed.
TIMED_RUNS = 3
NOTE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"enum": ["note", "report"]}, "text": {"type": "string"}},
    "required": ["kind", "text"],
}
SCHEMA_PROMPT = "A record as JSON: "
# What guides the draft: (forced tokens, masks, whether also below the tree's first level).
DRAFT_GUIDANCE = {
    "nothing": (False, False, False),
    "masks": (False, True, True),
    "forced tokens": (True, False, True),
    "both at first": (True, True, False),
    "both": (True, True, True),
}


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of the measured model.  end_token: a token that ends an output."""

    tokens: list[bytes]
    end_token: int

    def masker(self, grammar: Any) -> GrammarMasker:
        return GrammarMasker(
            grammar, len(self.tokens), (self.end_token,), None, lambda t: TokenBytes(self.tokens[t], True)
        )


def run(args: Namespace) -> int:
    require_at_least_one(args, "schemas")
    if args.tokens < 2:
        raise EspalierError(f"--tokens={args.tokens} is not supported: the first comes of no round; use 2 or more")
    in_bulk = args.schemas is not None or args.suite is not None
    if in_bulk and args.shape is not None:
        raise EspalierError("--schemas and --suite are for a model from files; leave out --shape")
    if in_bulk and find_spec("jsonschema") is None:
        raise EspalierError("--schemas and --suite need the jsonschema package: pip install jsonschema")
    if args.suite is not None and not any(args.suite.glob("*.json")):
        raise EspalierError(f"--suite={args.suite} has no *.json files; name tests/draft2020-12 of the suite")
    made = engines_of_flags(args, load_sizes(NUM_REQUESTS, PROMPT_TOKENS + args.tokens + 8))
    if in_bulk:
        with made.open() as bench:
            schemas, refused = [random_schema(seed) for seed in range(args.schemas or 0)], 0
            if args.suite is not None:
                schemas, refused = schemas_of_suite(bench.llm, args.suite)
            figures = {"refused": refused, **measure_schemas(bench.llm, schemas, args.tokens)}
            write_json(args.json, {**engine_report(args, bench.config), "schemas": figures})
        print_table([["", ""], *([name, str(value)] for name, value in figures.items())])
        return 0
    measured: dict[str, Any] = {}
    ways = variants_to_compare(made)
    for name, way in ways.items():
        with made.open(way) as bench:
            config, vocabulary = bench.config, vocabulary_of_model(bench.llm)
            form = compile_with_xgrammar(_xgrammar_compiler(vocabulary), Grammar.of_json_schema(NOTE_SCHEMA))
            if name == "tree":
                measured["host_ms"] = {f"{n} x {b}": mask_ms(vocabulary, form, n, b) for n, b in MASK_SIZES}
            measured[name] = _measure_loads(bench, vocabulary, form, args.tokens)
    write_json(args.json, {**engine_report(args, config), **measured})
    print_table(_table(measured, ways))
    return 0


def vocabulary_of_model(llm: LLM) -> Vocabulary:
    size = llm.inputs.model_info.vocab_size
    if llm.tokenizer is None:
        return Vocabulary(synthetic_vocabulary(size), size - 1)
    return Vocabulary(token_bytes(llm.tokenizer, size, False), llm.inputs.model_info.eos_token_ids[0])


def _xgrammar_compiler(vocabulary: Vocabulary) -> Any:
    import xgrammar

    info = xgrammar.TokenizerInfo(vocabulary.tokens, xgrammar.VocabType.RAW, stop_token_ids=[vocabulary.end_token])
    return xgrammar.GrammarCompiler(info)


def mask_ms(vocabulary: Vocabulary, grammar: Any, nodes: int, batch: int) -> float:
    """Median milliseconds of the masks of `batch` trees of `nodes` tokens that the grammar allows, inside a text."""
    rng = random.Random(0)
    trees, maskers = [], []
    for _ in range(batch):
        masker = vocabulary.masker(grammar)
        for byte in b'{"kind": "note", "text": "':
            masker.push(vocabulary.tokens.index(bytes([byte])))
        allowed = allowed_tokens(masker.root_mask())
        parents = [0, *(rng.randrange(node) for node in range(1, nodes))]
        trees.append(([0, *(int(rng.choice(allowed)) for _ in parents[1:])], parents))
        maskers.append(masker)
    builder, times = MaskBuilder(len(vocabulary.tokens), 1), []
    for _ in range(1 + MASK_REPEATS):
        begun = perf_counter()
        builder.node_masks(maskers, trees)
        times.append(perf_counter() - begun)
    return 1e3 * median(times[1:])


def _measure_loads(bench: BenchEngine, vocabulary: Vocabulary, grammar: Any, num_tokens: int) -> dict[str, Any]:
    """Figures of NUM_REQUESTS requests: none, one and all of them under the grammar, in turn."""
    prompts = bench.make_prompts([PROMPT_TOKENS] * NUM_REQUESTS)
    runs: dict[str, list[LoadFigures]] = {"none": [], "one": [], "all": []}
    for repeat in range(1 + TIMED_RUNS):
        for name, count in (("none", 0), ("one", 1), ("all", NUM_REQUESTS)):
            maskers = [vocabulary.masker(grammar) for _ in range(count)]
            timed = _run_load(bench.llm, prompts, num_tokens, maskers, vocabulary)
            if repeat:
                runs[name].append(timed)
    return {
        name: {
            "between_tokens_ms": median(each.between_tokens_ms for each in timed),
            "tokens_per_second": median(each.tokens_per_second for each in timed),
            "accept_length": timed[-1].accept_length,
        }
        for name, timed in runs.items()
    }


@dataclass(frozen=True)
class LoadFigures:
    """between_tokens_ms: median over the chunks of the requests without a grammar, or of all if each has one."""

    between_tokens_ms: float
    tokens_per_second: float
    accept_length: float


def _run_load(
    llm: LLM, prompts: Sequence[list[int]], num_tokens: int, maskers: Sequence[GrammarMasker], vocabulary: Vocabulary
) -> LoadFigures:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    requests = [llm.new_requests(prompt, llm.inputs.resolve(params), detokenize=False)[0] for prompt in prompts]
    for request, masker in zip(requests, maskers, strict=False):
        request.masker, request.stop_ids = masker, frozenset((vocabulary.end_token,))
    watched = {request.id for request in requests[len(maskers) :] or requests}
    for request in requests:
        llm.engine.add(request)
    last: dict[str, float] = {}
    gaps: list[float] = []
    begun, num_generated = 0.0, 0
    while llm.engine.has_work:
        for chunk in llm.step():
            now = perf_counter()
            if chunk.request_id in last:
                num_generated += len(chunk.token_ids)
                if chunk.request_id in watched:
                    gaps.append((now - last[chunk.request_id]) / max(1, len(chunk.token_ids)))
            begun = begun or now
            last[chunk.request_id] = now
    if failed := next((request.error for request in requests if request.error), None):
        raise EspalierError(f"a request failed: {failed}")
    rounds = sum(request.stats.rounds for request in requests)
    return LoadFigures(1e3 * median(gaps), num_generated / (max(last.values()) - begun), num_generated / max(rounds, 1))


def _table(measured: dict[str, Any], names: Iterable[str]) -> list[list[str]]:
    rows = [[f"{NUM_REQUESTS} requests", "ms between tokens", "tokens/s", "accept", "over plain"]]
    for name in names:
        for asked, figures in measured[name].items():
            plain = measured["plain"][asked]["tokens_per_second"]
            over = f"{figures['tokens_per_second'] / plain:.2f}" if name == "tree" else ""
            title = f"{name}, {asked} under a grammar"
            times = [f"{figures['between_tokens_ms']:.2f}", f"{figures['tokens_per_second']:.0f}"]
            rows.append([title, *times, f"{figures['accept_length']:.2f}", over])
        ratio = measured[name]["one"]["between_tokens_ms"] / measured[name]["none"]["between_tokens_ms"]
        rows.append([f"{name}, time of others: one over none", f"{ratio:.3f}", "", "", ""])
    for sizes, each in measured.get("host_ms", {}).items():
        rows.append([f"host ms a round for masks, {sizes}", f"{each:.2f}", "", "", ""])
    return rows


# Many schemas


def schemas_of_suite(llm: LLM, folder: Path) -> tuple[list[Any], int]:
    """The schemas of a folder of the JSON-Schema-Test-Suite (tests/draft2020-12) that are enforced, and the number of
    those that are refused."""
    assert llm.grammars is not None
    schemas, num_refused = [], 0
    for file in sorted(folder.glob("*.json")):
        for group in json.loads(file.read_text(encoding="utf-8")):
            try:
                grammar = Grammar.of_json_schema(group["schema"], strict=False)
                check_grammar(grammar)
                llm.grammars.compile(grammar)
                schemas.append(group["schema"])
            except EspalierError:
                num_refused += 1
    return schemas, num_refused


def measure_schemas(llm: LLM, schemas: Sequence[Any], max_tokens: int = 400) -> dict[str, Any]:
    """Generate a value of each schema, greedy and sampled in turn.  Needs the jsonschema package."""
    count = len(schemas)
    outputs: dict[str, list[Output]] = {}
    with progress("generating", len(DRAFT_GUIDANCE) + 1) as advance:
        for name, told in DRAFT_GUIDANCE.items():
            masks = llm.engine.scheduler.mask_builder
            masks.guides_forced, masks.guides_mask, masks.guides_all_levels = told
            outputs[name] = _generate_values(llm, schemas, max_tokens, speculation=True)
            advance()
        outputs["off"] = _generate_values(llm, schemas, max_tokens, speculation=False)
        advance()
    both = outputs["both"]
    ended = [output.finish_reason == "stop" for output in both]
    pairs = zip(schemas, both, ended, strict=True)
    same = [len({tuple(each[i].token_ids) for each in outputs.values()}) == 1 for i in range(count)]
    return {
        "schemas": count,
        "failed": sum(any(each[i].error for each in outputs.values()) for i in range(count)),
        "ended by themselves": sum(ended),
        "valid of those": sum(is_valid(schema, output.text) for schema, output, end in pairs if end),
        "equal with speculation off": sum(same),
        **{f"accept length, draft told {name}": round(_accept_length(outputs[name]), 3) for name in DRAFT_GUIDANCE},
    }


def _generate_values(llm: LLM, schemas: Sequence[Any], max_tokens: int, speculation: bool) -> list[Output]:
    params = [
        SamplingParams(
            temperature=0.8 if i % 2 else 0.0,
            seed=i,
            max_tokens=max_tokens,
            speculation=speculation,
            grammar=Grammar.of_json_schema(json.dumps(schema), strict=False),
        )
        for i, schema in enumerate(schemas)
    ]
    return llm.generate([SCHEMA_PROMPT] * len(schemas), params)


def _accept_length(outputs: Sequence[Output]) -> float:
    # The first token of an output comes from its prefill.
    return sum(len(each.token_ids) - 1 for each in outputs) / sum(each.speculation.rounds for each in outputs)


def is_valid(schema: Any, text: str) -> bool:
    """Whether a text is a value of the schema, by the jsonschema package."""
    import jsonschema  # type: ignore[import-untyped]

    try:
        return bool(jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)))
    except (ValueError, RecursionError):
        return False
