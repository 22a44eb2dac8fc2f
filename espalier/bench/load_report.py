"""`espalier bench load`: runs a load on an engine with tree speculation and on an engine without, or on servers.

It reports tokens a second, latencies, how the time was spent, and the share of tokens that the target ran in vain.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from espalier.bench import datasets, open_loop
from espalier.bench.drive import (
    BenchEngine,
    BenchEngines,
    empty_prefix_cache,
    engines_of,
    require_positions,
    variants_to_compare,
)
from espalier.bench.flags import (
    DATASET_FLAGS,
    DEFAULT_REQUESTS,
    INPUT_BOUNDS,
    OUTPUT_BOUNDS,
    SERVER_FLAGS,
    refuse_unused_load_flags,
)
from espalier.bench.load import (
    Arrivals,
    BenchConversations,
    Load,
    LoadResult,
    RandomConversations,
    random_load,
    serve_conversations,
    serve_random,
)
from espalier.bench.report import category_table, command_line, json_value, latency_rows, write_markdown
from espalier.bench.traffic import REASONING_SWITCHES, Conversation, messages_until_turn, plain_prompt
from espalier.config import ResolvedConfig
from espalier.errors import EspalierError, require_number
from espalier.llm import LLM
from espalier.request import Request, SamplingParams
from espalier.terminal.console import print_table, require_writable, write_json
from espalier.terminal.flags import flag_of, given_flags, require_at_least_one

# The number of output tokens of a request that warms an engine up.
WARM_UP_TOKENS = 8
NUMBER_FORMATS = (
    ("seconds", "{:.2f}"),
    ("tokens_in_per_second", "{:.0f}"),
    ("tokens_out_per_second", "{:.0f}"),
    ("accept_length", "{:.2f}"),
    ("tokens_in_cached", "{}"),
    ("cached_share", "{:.1%}"),
    ("outputs_hash", "{}"),
    ("wasted_rows", "{:.0%}"),
)


class DatasetConversations:
    """Conversations of a dataset.  thinking: the chat template's switch for reasoning; None for the default.
    think_s: seconds from an answer to the next turn."""

    def __init__(
        self, llm: LLM, conversations: Sequence[Conversation], temperature: float, thinking: bool | None, think_s: float
    ) -> None:
        """Raises EspalierError if the model has no tokenizer, or if a conversation may not fit max_context."""
        if llm.tokenizer is None:
            raise EspalierError("--dataset is text, and this model has no tokenizer; leave --dataset out")
        self.llm, self.tokenizer, self.conversations = llm, llm.tokenizer, conversations
        self.temperature, self.think_s = temperature, think_s
        self.has_template = bool(llm.tokenizer.template.source)
        read_switches = [name for name in REASONING_SWITCHES if llm.tokenizer.template.reads_variable(name)]
        if thinking is not None and not read_switches:
            raise EspalierError(
                f"--thinking: this model's chat template reads none of {', '.join(REASONING_SWITCHES)}; leave it out"
            )
        self.template_kwargs = None if thinking is None else {read_switches[0]: thinking}
        for talk in conversations:
            self._require_fits(talk)

    @property
    def num_conversations(self) -> int:
        return len(self.conversations)

    def category(self, index: int) -> str:
        return self.conversations[index].category

    def num_turns(self, index: int) -> int:
        return len(self.conversations[index].turns)

    def next_request(self, index: int, earlier: Sequence[Request]) -> Request:
        """Returns the next request of conversation `index`.  earlier: the requests of its earlier turns."""
        talk, turn = self.conversations[index], len(earlier)
        prompt = self._prompt_tokens(talk, [self.tokenizer.decode(request.output) for request in earlier])
        params = SamplingParams(
            temperature=self.temperature, max_tokens=talk.turns[turn].max_tokens, seed=1000 * index + turn
        )
        [request] = self.llm.new_requests(prompt, self.llm.inputs.resolve(params), detokenize=False)
        return request

    def _prompt_tokens(self, conversation: Conversation, answers: Sequence[str]) -> list[int]:
        """Returns the prompt of the turn that follows `answers`, the model's answers in the earlier turns."""
        if not self.has_template:
            return self.tokenizer.encode(plain_prompt(conversation, answers))
        return self.llm.chat_prompt(
            messages_until_turn(conversation, answers), chat_template_kwargs=self.template_kwargs
        )

    def _require_fits(self, conversation: Conversation) -> None:
        max_context = self.llm.config.layout.max_context
        prompt = self._prompt_tokens(conversation, [""] * (len(conversation.turns) - 1))
        num_most = len(prompt) + sum(turn.max_tokens for turn in conversation.turns)
        if num_most > max_context:
            raise EspalierError(
                f"conversation {conversation.index + 1} of --dataset may have {num_most} tokens with its answers, and "
                f"max_context={max_context}; raise --max-context, lower --output, or leave it out of the file"
            )


def run(args: Namespace, engines_of: Callable[..., BenchEngines] = engines_of) -> int:
    """Runs the command `espalier bench load`.  engines_of: see espalier/bench/drive.py:engines_of."""
    refuse_unused_load_flags(args)
    if args.url:
        if given := [name for name in given_flags(args) if name != "model"]:
            raise EspalierError(f"{flag_of(given[0])} is not for --url: its server runs already; leave one out")
        require_at_least_one(args, "concurrency")
        return open_loop.run(args)
    if given := [name for name in SERVER_FLAGS if getattr(args, name) is not None]:
        raise EspalierError(f"{flag_of(given[0])} is for a running server; give its --url too")
    dataset = datasets.dataset_from_flags(args)
    load = _load_of_flags(args) if dataset is None else None
    require_writable("--markdown", args.markdown)
    results, config = {}, None
    for name, cells in _results_by_variant(args, load, dataset, engines_of):
        results[name], config = cells, config or cells[0][1]
    assert config is not None
    figures = {name: [result.figures() for result, _ in cells] for name, cells in results.items()}
    pairs = _rates_and_temperatures(args)
    cells = [{name: by_pair[i] for name, by_pair in figures.items()} for i in range(len(pairs))]
    report = {"command": command_line(), "config": config.as_dict(), "concurrency": args.concurrency}
    if dataset is not None:
        report["dataset"] = {name: json_value(getattr(args, name)) for name in ("dataset", "output", *DATASET_FLAGS)}
    names = [{"rate": rate, "temperature": temperature} for rate, temperature in pairs]
    write_json(args.json, {**report, "cells": [{**name, **cell} for name, cell in zip(names, cells, strict=True)]})
    tables = []
    for (rate, temperature), cell in zip(pairs, cells, strict=True):
        title = "" if rate is None else f"{rate:g} a second"
        if dataset is not None:
            title = f"{title}, temperature {temperature:g}".removeprefix(", ")
        tables.append(_table_rows(title, cell))
        if dataset is not None:
            tables += [category_table(f"{title}, {name}", values["categories"]) for name, values in cell.items()]
    write_markdown(args.markdown, tables)
    for table in tables:
        print_table(table)
    return 0


def _rates_and_temperatures(args: Namespace) -> list[tuple[float | None, float]]:
    """Returns the (rate, temperature) pairs to measure, one after another."""
    return [(rate, temperature) for temperature in args.temperature for rate in args.rate or [None]]


def _load_of_flags(args: Namespace) -> Load:
    """Returns the load that the flags describe.  Raises EspalierError."""
    require_at_least_one(args, "requests", "concurrency", "burst", "turns", "prefix_length")
    for rate in args.rate or ():
        require_number("--rate", rate, lambda rate: rate > 0, "more than 0")
    for name in ("prefixes", "think"):
        require_number(flag_of(name), getattr(args, name), lambda value: value >= 0, "0 or more", optional=True)
    return random_load(
        args.requests or DEFAULT_REQUESTS,
        args.input or INPUT_BOUNDS,
        args.output or OUTPUT_BOUNDS,
        args.turns or 1,
        num_prefixes=args.prefixes or 0,
        prefix_tokens=args.prefix_length or open_loop.DEFAULT_FLAGS["prefix_length"],
        think_s=open_loop.DEFAULT_FLAGS["think"] if args.think is None else args.think,
    )


def _results_by_variant(
    args: Namespace, load: Load | None, dataset: Sequence[Conversation] | None, engines_of: Callable[..., BenchEngines]
) -> Any:
    """Yields (name of an engine variant, [(result, config) for each pair of rate and temperature])."""
    engines = engines_of(args, {}, **({} if load is None else {"max_context": load.max_tokens}))
    if load is not None:
        length_flags = (
            "--input {},{}".format(*(args.input or INPUT_BOUNDS)),
            "--output {},{}".format(*(args.output or OUTPUT_BOUNDS)),
        )
        require_positions(engines.max_positions, load.max_tokens, *length_flags)
    think = open_loop.DEFAULT_FLAGS["think"] if args.think is None else args.think
    for name, variant in variants_to_compare(engines).items():
        with engines.open(variant) as bench:

            def conversations_at(temperature: float, bench: BenchEngine = bench) -> BenchConversations:
                if load is not None:
                    return RandomConversations(load, load.user_texts(bench.make_prompts(load.prompt_lengths)))
                return DatasetConversations(bench.llm, dataset or (), temperature, args.thinking, think)

            by_temperature = {temperature: conversations_at(temperature) for temperature in args.temperature}
            _warm_up(bench, load, args.concurrency or next(iter(by_temperature.values())).num_conversations)
            results: list[tuple[LoadResult, ResolvedConfig]] = []
            for rate, temperature in _rates_and_temperatures(args):
                empty_prefix_cache(bench.engine)
                arrivals = open_loop.arrivals_of(args, rate)
                results.append((serve_conversations(bench.engine, by_temperature[temperature], arrivals), bench.config))
            yield name, results


def _warm_up(bench: BenchEngine, load: Load | None, batch_size: int) -> None:
    """Runs short requests before the measurements.  load: None for a dataset.  batch_size: how many requests."""
    count = min(batch_size, bench.config.layout.max_batch)
    count = count if load is None else min(count, load.num_conversations)
    lengths = [INPUT_BOUNDS[0] if load is None else load.load_of_conversation(i).input_lengths[0] for i in range(count)]
    serve_random(bench.engine, bench.make_prompts(lengths), Load(tuple(lengths), (WARM_UP_TOKENS,) * count), Arrivals())


def _table_rows(title: str, figures: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Returns the rows of a table with a column for each engine variant.  figures: {variant: its figures by name}."""
    rows = [[title, *figures]]
    rows += [
        [name.replace("_", " "), *(form.format(each[name]) for each in figures.values())]
        for name, form in NUMBER_FORMATS
    ]
    kinds = next(iter(figures.values()))["time_shares"]
    shares = [" / ".join(f"{share:.0%}" for share in each["time_shares"].values()) for each in figures.values()]
    rows.append([f"time in {', '.join(kinds)}", *shares])
    return rows + latency_rows(figures.values())
