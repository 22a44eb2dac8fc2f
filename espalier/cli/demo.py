"""`espalier demo`: completes held-out prompts by plain decoding and by tree speculation, and draws one round.

The drawing shows each node's score, the accepted nodes with the pages of their K/V, and the rejected nodes.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from shutil import which
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.text import Text

from espalier.bench.drive import heldout_texts
from espalier.engine.launch_input import RoundTrace
from espalier.errors import EspalierError
from espalier.limits import MAX_LOGPROBS
from espalier.llm import LLM
from espalier.request import Output, SamplingParams
from espalier.stats import SpeculationStats
from espalier.terminal.console import (
    DIM_STYLE,
    DRAFT_STYLE,
    UNICODE_SIGNS,
    DrawingSigns,
    colour_by_source,
    drawing_signs,
    has_colour,
    machine_line,
    progress,
    stdout,
    waiting,
)
from espalier.terminal.flags import engine_settings, require_at_least_one

VOID_TOKEN = -1
TokenName = Callable[[int], str]


def draw_round_tree(trace: RoundTrace, token_name: TokenName, signs: DrawingSigns) -> Text:
    """Returns a drawing of the tree of the round `trace`.  token_name(token): a token's text.  signs: for lines.

    A node's score is the sum of the draft's log-probabilities on the path from the root to the node."""
    drawing = Text()
    _draw_node(drawing, trace, 0, "", "", token_name, signs)
    bonus = trace.emitted[-1]
    position = trace.prefix_len + len(trace.emitted)
    drawing.append(f"next root: {token_name(bonus)}, picked by the target, at position {position}\n")
    drawing.append(_summary(trace), DIM_STYLE)
    return drawing


def _draw_node(
    drawing: Text,
    trace: RoundTrace,
    node: int,
    line_prefix: str,
    branch_sign: str,
    token_name: TokenName,
    signs: DrawingSigns,
) -> None:
    """Appends to `drawing` a line for `node`, which begins with line_prefix + branch_sign, and lines for its
    subtrees."""
    accepted = node in trace.tree.path_rows
    label = token_name(trace.tree.tokens[node])
    if node == 0:
        drawing.append(f"{label}  root", "bold")
    else:
        drawing.append(line_prefix + branch_sign, DIM_STYLE)
        sign, style = (signs.accepted, DRAFT_STYLE) if accepted else (signs.rejected, DIM_STYLE)
        drawing.append(f"{sign} {label}", style)
        score = trace.tree.scores[node]
        drawing.append(f"  {score:.2f}" if isfinite(score) else "", DIM_STYLE)
    if accepted:
        drawing.append(f"  {signs.empty_bar} {_place_of_node(trace, node)}", "cyan")
    drawing.append("\n")
    children = [
        i for i, parent in enumerate(trace.tree.parents) if i and parent == node and trace.tree.tokens[i] != VOID_TOKEN
    ]
    child_prefix = line_prefix if node == 0 else line_prefix + (signs.vertical if branch_sign == signs.branch else "  ")
    for child in children:
        child_sign = signs.last_branch if child == children[-1] else signs.branch
        _draw_node(drawing, trace, child, child_prefix, child_sign, token_name, signs)


def _place_of_node(trace: RoundTrace, node: int) -> str:
    """Returns a text with the position, page and row of an accepted node's K/V."""
    position = trace.prefix_len + trace.tree.depths[node]
    page = trace.pages[position // trace.page_size]
    return f"position {position}, page {page} row {position % trace.page_size}"


def _summary(trace: RoundTrace) -> str:
    num_drafted = sum(token != VOID_TOKEN for token in trace.tree.tokens) - 1
    num_accepted = len(trace.tree.path_rows) - 1
    return (
        f"{num_drafted} draft tokens verified in one pass, {num_accepted} accepted; {num_accepted + 1} rows committed, "
        f"{num_drafted - num_accepted} rejected that never were in the cache\n"
    )


NUM_PROMPT_LINES = 6
BAR_WIDTH = 40
NEXT_STEPS = (
    'espalier generate "def fibonacci(n):" --max-tokens 80',
    'espalier generate "class Stack:" --temperature 0.7 --seed 1 --steps 3 --topk 2 --num-draft-tokens 8',
    "espalier bench load",
)


@dataclass
class DecodingResult:
    """The results of one engine (plain or with the tree) for all prompts.  seconds: the total time of generation."""

    outputs: list[Output] = field(default_factory=list)
    seconds: float = 0.0
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    @property
    def tokens_per_second(self) -> float:
        return sum(len(output.token_ids) for output in self.outputs) / max(self.seconds, 1e-9)


def run(args: Namespace) -> int:
    return show_demo(args, stdout(wrap=True))


def show_demo(args: Namespace, console: Console) -> int:
    """Print the demo.  Returns 1 if plain decoding and the tree differ in tokens, else 0.  Raises EspalierError."""
    # max_batch is 1, because two engines share the device, and each runs one request at a time.  dtype is float32,
    # because rounding in bfloat16 may change which of two almost equally likely tokens is the likeliest.
    require_at_least_one(args, "max_tokens")
    settings = {"max_batch": 1, "dtype": "float32", **engine_settings(args)}
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    prompts = [entry["prompt"] for entry in heldout_texts()]
    if not 1 <= args.prompts <= len(prompts):
        raise EspalierError(f"--prompts={args.prompts} is not supported; use 1 to {len(prompts)}")
    prompts = prompts[: args.prompts]
    console.print(Text(machine_line(), DIM_STYLE))
    with waiting("loading the model twice, with and without speculation"):
        tree_llm = LLM(**settings)
        _require_tree(tree_llm)
        plain_llm = LLM(**{**settings, "speculation": None})
    traces: list[RoundTrace] = []
    tree_llm.engine.scheduler.on_round = traces.append
    with tree_llm, plain_llm:
        _warm_up(plain_llm, tree_llm, prompts[0])
        traces.clear()
        plain, tree = _complete_prompts(console, plain_llm, tree_llm, prompts, params)
        is_identical = _print_comparison(console, plain_llm, prompts, plain, tree)
        _draw_round(console, tree_llm, traces)
    _print_figures(console, plain, tree)
    console.print(Text("\ntry next", "bold"))
    for command in NEXT_STEPS:
        console.print(Text("  " + command.replace("espalier", _start_command(), 1)))
    return 0 if is_identical else 1


def _require_tree(llm: LLM) -> None:
    """If the LLM has no tree, close it and raise EspalierError."""
    if not llm.engine.layout.steps:
        llm.close()
        raise EspalierError(
            "the demo compares a tree with plain decoding, and no tree is set; leave out --algorithm and --steps"
        )


def _start_command() -> str:
    """Returns the command that runs espalier: a path if `espalier` is not on PATH."""
    if which("espalier") or Path(sys.argv[0]).name != "espalier":
        return "espalier"
    path = Path(sys.argv[0]).absolute()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _warm_up(plain_llm: LLM, tree_llm: LLM, prompt: str) -> None:
    for llm in (plain_llm, tree_llm):
        llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=8))


def _complete_prompts(
    console: Console, plain_llm: LLM, tree_llm: LLM, prompts: list[str], params: SamplingParams
) -> tuple[DecodingResult, DecodingResult]:
    """Completes each prompt by plain decoding, then with the tree.  The two engines take turns, so that other programs
    on the machine slow both equally."""
    plain, tree = DecodingResult(), DecodingResult()
    with progress("completing", 2 * len(prompts)) as advance:
        for prompt in prompts:
            for llm, result in ((plain_llm, plain), (tree_llm, tree)):
                started_at = perf_counter()
                [output] = llm.generate(prompt, params)
                result.seconds += perf_counter() - started_at
                result.outputs.append(output)
                result.stats.merge(output.speculation)
                advance()
    for i, (prompt, output) in enumerate(zip(prompts, tree.outputs, strict=True), 1):
        _print_rule(console, f"prompt {i} of {len(prompts)}")
        console.print(_prompt_and_output(console, tree_llm, prompt, output))
    return plain, tree


def _print_rule(console: Console, title: str = "") -> None:
    dash = "─" if drawing_signs(console) is UNICODE_SIGNS else "-"
    console.rule(Text(title, DIM_STYLE), style=DIM_STYLE, align="left", characters=dash)


def _prompt_and_output(console: Console, llm: LLM, prompt: str, output: Output) -> Text:
    """Returns the prompt's last lines, dimmed, and the output.  Without colours, a sign separates prompt and output."""
    assert llm.tokenizer is not None
    last_lines = prompt.splitlines(keepends=True)[-NUM_PROMPT_LINES:]
    end = "" if has_colour(console) else drawing_signs(console).prompt_end
    text = colour_by_source(llm.tokenizer, llm.tokenizer.encode(prompt), output.token_ids, output.from_draft)
    return Text.assemble(("".join(last_lines), DIM_STYLE), end, text)


def _print_comparison(
    console: Console, plain_llm: LLM, prompts: list[str], plain_result: DecodingResult, tree_result: DecodingResult
) -> bool:
    """Print whether both engines gave the same tokens, or where the first difference is.  Returns whether they did."""
    _print_rule(console)
    for i, (prompt, a, b) in enumerate(zip(prompts, plain_result.outputs, tree_result.outputs, strict=True), 1):
        if a.token_ids != b.token_ids:
            pairs = zip(a.token_ids, b.token_ids, strict=False)
            first = next((j for j, (x, y) in enumerate(pairs) if x != y), min(len(a.token_ids), len(b.token_ids)))
            console.print(Text(f"prompt {i}: plain and tree differ from token {first} on", "bold red"))
            differing_tokens = [output.token_ids[first] for output in (a, b) if first < len(output.token_ids)]
            console.print(Text(_logprobs_text(plain_llm, prompt, a.token_ids[:first], differing_tokens)))
            return False
    tokens = sum(len(output.token_ids) for output in tree_result.outputs)
    drafted = sum(sum(output.from_draft) for output in tree_result.outputs)
    same = f"plain decoding gave the same {tokens} tokens, one by one"
    console.print(Text.assemble(("identical: ", "bold green"), same))
    legend: list[Any] = [f"{drawing_signs(console).prompt_end}: end of a prompt; tokens that"]
    if has_colour(console):
        legend = [("dim", DIM_STYLE), ": the prompts; ", ("tokens like this", DRAFT_STYLE)]
    console.print(Text.assemble(*legend, f" came from the draft: {drafted} of {tokens}\n"))
    return True


def _logprobs_text(llm: LLM, prompt: str, prior_tokens: list[int], tokens: list[int]) -> str:
    """Returns a text with the log-probabilities of `tokens` after the prompt and `prior_tokens`, by plain decoding."""
    assert llm.tokenizer is not None
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=MAX_LOGPROBS)
    [output] = llm.generate([[*llm.tokenizer.encode(prompt), *prior_tokens]], params)
    assert output.logprobs
    logprobs = dict(output.logprobs[0].top)
    texts = (
        f"{llm.tokenizer.token_name(token)!r} {logprobs[token]:.6f}" if token in logprobs else "" for token in tokens
    )
    listed = ", ".join(text or f"one not among the {MAX_LOGPROBS} likeliest" for text in texts)
    return f"log-probabilities there by plain decoding: {listed}; rounding decides between two that are nearly equal"


def _draw_round(console: Console, llm: LLM, traces: list[RoundTrace]) -> None:
    """Draws the first of the rounds `traces` that emitted the most tokens.  Rounds that emitted at least as many tokens
    as the greatest depth of all trees count as equal, so the drawn round may have rejected a node of this depth."""
    if not traces or llm.tokenizer is None:
        return
    deepest = max(trace.tree.depths[-1] if trace.tree.depths else 0 for trace in traces)
    shown_trace = max(traces, key=lambda trace: min(len(trace.emitted), max(deepest, 2)))
    subtitle = ", score = log-probability of the branch by the draft"
    console.print(Text.assemble(("one round", "bold"), (subtitle, DIM_STYLE)))
    decode = llm.tokenizer.decode
    console.print(draw_round_tree(shown_trace, lambda token: repr(decode([token])), drawing_signs(console)))


def _print_figures(console: Console, plain_result: DecodingResult, tree_result: DecodingResult) -> None:
    console.print(Text("figures", "bold"))
    ratio = tree_result.tokens_per_second / plain_result.tokens_per_second
    console.print(Text(f"  plain          {plain_result.tokens_per_second:7.1f} tokens/s"))
    console.print(Text(f"  tree           {tree_result.tokens_per_second:7.1f} tokens/s, {ratio:.2f} times plain"))
    stats = tree_result.stats
    console.print(Text(f"  accept length  {stats.accept_length:7.2f} tokens a round, over {stats.rounds} rounds"))
    for line in _histogram(stats, drawing_signs(console), console.width):
        console.print(Text(line))


def _histogram(stats: SpeculationStats, signs: DrawingSigns, width: int) -> Iterator[str]:
    """Yields a line with a bar for each accept length.  Lines fit into `width` columns if possible."""
    max_rounds = max(stats.histogram, default=0)
    for length, rounds in enumerate(stats.histogram):
        if length:
            label = f"  {length} token{'s' if length > 1 else ' '} a round  {rounds:5d} "
            longest = max(1, min(BAR_WIDTH, width - len(label)))
            yield label + signs.bar * round(longest * rounds / max_rounds)
