"""`python -m lab defaults`: an engine as `LLM(model)` makes it on a CPU, over one without speculation.

Requests that opt out of speculation are measured in the first engine too.  The engines take turns at every prompt, so
that a busy machine slows them equally.  Both processor time and wall time are counted.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from operator import truediv
from statistics import median
from time import perf_counter, process_time
from typing import Any

from espalier.llm import LLM
from espalier.request import Output, SamplingParams
from espalier.terminal.console import print_table, progress, write_json
from lab.bench.sources import code_prompts, edited_file_prompts, prose_prompts

# (whether the engine speculates, whether the requests do)
DECODING_MODES: Mapping[str, tuple[bool, bool]] = {
    "plain": (False, True),
    "default": (True, True),
    "opted out": (True, False),
}
CLOCKS: Mapping[str, Callable[[], float]] = {"processor": process_time, "wall": perf_counter}
# Prompts for a chat model.  Other models continue texts.
CHAT_PROMPTS: Mapping[str, Sequence[str]] = {
    "prose": (
        "Tell me the story of a lighthouse keeper who finds a letter.",
        "What was daily life like in a medieval town?",
        "Describe a walk through a forest in autumn.",
        "Explain to a child why the sky is blue.",
    ),
    "code": (
        "Write a Python class for a stack with push, pop and peek.",
        "Write a Python function that parses a CSV line with quotes.",
        "Write a binary search in C with comments.",
        "Write a SQL schema for a library with books, members and loans.",
    ),
    "repetitive": (
        "Repeat the following list three times: apple, pear, plum, cherry, grape, melon, fig, date.",
        "Count from 1 to 60, one number a line.",
        "Write the same sentence twenty times: The train to the north leaves at noon.",
        "Print the multiplication table of seven, five times.",
    ),
}


def run(args: Namespace) -> None:
    texts = {
        "prose": prose_prompts(args.prompts),
        "code": code_prompts(args.prompts),
        "repetitive": edited_file_prompts(args.prompts)[:: 10 // 2],
    }
    asked = {name: CHAT_PROMPTS[name] if args.chat else each for name, each in texts.items()}
    with ExitStack() as stack, progress("measuring", len(asked)) as advance:
        made = {
            speculates: stack.enter_context(
                LLM(args.model, threads=1, prefix_cache=False, **({} if speculates else {"speculation": None}))
            )
            for speculates in (False, True)
        }
        rows = []
        for name, prompts in asked.items():
            rows.append({"text": name, **measure_modes(made, prompts[: args.prompts], args)})
            advance()
    write_json(args.json, {"defaults": rows})
    print_table([list(rows[0]), *([str(value) for value in row.values()] for row in rows)])


def measure_modes(engines: Mapping[bool, LLM], prompts: Sequence[str], args: Namespace) -> dict[str, Any]:
    """Returns plain decoding's tokens per second of processor time, the other modes' speedups, and the accept length.

    Speedups are medians over the repeats.
    """
    spent: dict[tuple[str, str], list[float]] = {(way, clock): [] for way in DECODING_MODES for clock in CLOCKS}
    num_tokens, lengths = 0, []
    for repeat in range(args.repeats + 1):
        sums = dict.fromkeys(spent, 0.0)
        num_tokens = 0
        for prompt in prompts:
            said = set()
            for way, (speculates, wants) in DECODING_MODES.items():
                begun = {clock: now() for clock, now in CLOCKS.items()}
                params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True, speculation=wants)
                output = _generate_answer(engines[speculates], prompt, params, args.chat)
                for clock, now in CLOCKS.items():
                    sums[way, clock] += now() - begun[clock]
                said.add(tuple(output.token_ids))
                if way == "default":
                    lengths.append(output.speculation.accept_length)
            num_tokens += len(output.token_ids)
            assert len(said) == 1, "tokens do not depend on speculation"
        # The first repeat is a warm-up.
        if repeat:
            for key, seconds in sums.items():
                spent[key].append(seconds)
    ratios = {
        f"{way}, {clock}": round(median(map(truediv, spent["plain", clock], spent[way, clock])), 3)
        for way in DECODING_MODES
        if way != "plain"
        for clock in CLOCKS
    }
    plain = num_tokens / median(spent["plain", "processor"])
    return {"plain tokens/s": round(plain, 1), **ratios, "accept length": round(sum(lengths) / len(lengths), 2)}


def _generate_answer(llm: LLM, prompt: str, params: SamplingParams, is_chat: bool) -> Output:
    said: Any = llm.chat_prompt([{"role": "user", "content": prompt}]) if is_chat else prompt
    return llm.generate([said], params)[0]
