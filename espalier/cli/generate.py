"""`espalier generate`: completes prompts, or answers prompts as chat messages.

Generated text is streamed to stdout.  Other output goes to stderr.
"""

import json
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from rich.text import Text

from espalier.config import EngineConfig
from espalier.errors import EspalierError, without_duplicate_keys
from espalier.inputs import InputProcessor
from espalier.request import Output, OutputChunk, SamplingParams
from espalier.terminal.console import DIM_STYLE, DRAFT_STYLE, TARGET_STYLE, progress, read_text, stderr, stdout, waiting
from espalier.terminal.flags import (
    add_engine_flags,
    add_sampling_flags,
    engine_settings,
    flag_of,
    require_readable,
    sampling_params,
)

if TYPE_CHECKING:
    from espalier.llm import LLM

DEFAULT_MAX_TOKENS = 128


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument("prompts", nargs="*", metavar="prompt", help="text to complete; - is read from stdin")
    parser.add_argument("--file", type=Path, metavar="FILE", help='prompts, a JSON string or {"prompt": ...} per line')
    parser.add_argument(
        "--chat", action="store_true", help="treat each prompt as a user's message, with the chat template"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object per prompt, after all are done")
    add_engine_flags(parser, leave_out=("seed",))
    add_sampling_flags(parser, DEFAULT_MAX_TOKENS)


def run(args: Namespace) -> int:
    prompts = _read_prompts(args)
    params = sampling_params(args)
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None and not args.json:
            raise EspalierError(f"{flag_of(name)} is printed by --json alone; add that, or leave {flag_of(name)} out")
    if args.chat and not all(isinstance(prompt, str) for prompt in prompts):
        raise EspalierError("--chat is for messages, and --file holds token ids; write text, or leave --chat out")
    # Imported here, so that help texts and errors in prompts do not wait for PyTorch.
    from espalier.llm import LLM, prepare_engine

    # Check prompts and parameters before the weights are loaded, which may take minutes.
    with waiting("loading the tokenizer"):
        prepared = prepare_engine(EngineConfig(**engine_settings(args)))
    inputs = prepared.inputs
    inputs.resolve(params)
    prepared_prompts = [_checked_prompt(inputs, i, prompts, params, args.chat) for i in range(len(prompts))]
    token_lists = [tokens for tokens, _ in prepared_prompts]
    params_by_prompt = [prompt_params for _, prompt_params in prepared_prompts]
    with waiting("loading the model"):
        llm = LLM.from_prepared(prepared)
    with llm:
        if len(token_lists) == 1 and not args.json and params.n in (None, 1):
            return _print_stream(llm, token_lists[0], params_by_prompt[0])
        return _print_outputs(llm, token_lists, params_by_prompt, args.json)


def _checked_prompt(
    inputs: InputProcessor, index: int, prompts: list[Any], params: SamplingParams, chat: bool
) -> tuple[list[int], SamplingParams]:
    """Returns the tokens and parameters of prompts[index].  If neither flags nor model set max_tokens, it is
    DEFAULT_MAX_TOKENS, or as many tokens as fit after the prompt.  chat: whether the prompt is a chat message."""
    from espalier.llm import number_prompt_errors

    with number_prompt_errors(index, len(prompts)):
        message = {"role": "user", "content": prompts[index]}
        prompt = inputs.chat_tokens([message], inputs.require_text_fits) if chat else prompts[index]
        tokens = inputs.prompt_tokens(prompt)
        inputs.require_room(tokens, params)
        if params.max_tokens is None and "max_new_tokens" not in inputs.model_info.generation_config:
            params = replace(params, max_tokens=min(DEFAULT_MAX_TOKENS, inputs.model_info.max_context - len(tokens)))
        return tokens, params


def _read_prompts(args: Namespace) -> list[Any]:
    prompts: list[Any] = [
        _read_stdin() if prompt == "-" else require_readable(prompt, "a prompt", sys.getfilesystemencoding())
        for prompt in args.prompts
    ]
    if args.file is not None:
        prompts += _read_prompt_file(args.file)
    if not prompts and sys.stdin is not None and not sys.stdin.isatty():
        prompts = [_read_stdin()]
    if not prompts:
        raise EspalierError(
            "a prompt is missing; write one after the command, or '-' to read it from stdin, or use --file"
        )
    return prompts


def _read_stdin() -> str:
    if sys.stdin is None:
        raise EspalierError("stdin is closed; write a prompt after the command, pipe one in, or use --file")
    try:
        text = require_readable(sys.stdin.read(), "the text from stdin", sys.stdin.encoding)
    except UnicodeDecodeError as error:
        raise EspalierError(f"stdin cannot be read ({error}); use text in {sys.stdin.encoding}") from None
    if not text:
        raise EspalierError("stdin is empty; write a prompt after the command, pipe one in, or use --file")
    return text


def _read_prompt_file(path: Path) -> list[Any]:
    # Not splitlines(), which would also split at line separators inside JSON strings.
    lines = read_text("--file", path).split("\n")
    prompts: list[Any] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line, object_pairs_hook=without_duplicate_keys)
            prompt = value if isinstance(value, str) else value["prompt"]
        except EspalierError as error:
            raise EspalierError(f"--file {path}, line {number}: {error}") from None
        except (ValueError, TypeError, KeyError, RecursionError):
            prompt = None
        if not isinstance(prompt, str | list):  # a list is token ids, which are checked later
            raise EspalierError(
                f'--file {path}, line {number}: not a JSON string and not an object with "prompt"; write one per line'
            )
        if isinstance(value, dict) and (other_names := [name for name in value if name != "prompt"]):
            raise EspalierError(
                f'--file {path}, line {number}: {other_names[0]!r} has no effect there; keep only "prompt" and give '
                "flags, or use `espalier batch`"
            )
        prompts.append(prompt)
    if not prompts:
        raise EspalierError(f"--file {path} contains no prompt; write one per line")
    return prompts


def _print_stream(llm: "LLM", prompt: Any, params: SamplingParams) -> int:
    """Print the text while it is generated.  On a terminal, tokens from the draft are coloured."""
    console = stdout()
    started_at = perf_counter()
    num_tokens = 0
    chunk = OutputChunk("")
    for chunk in llm.stream(prompt, params):
        num_tokens += len(chunk.token_ids)
        # A chunk with any token from the draft is coloured, because a chunk's text cannot be divided into its tokens.
        console.print(Text(chunk.text, DRAFT_STYLE if any(chunk.from_draft) else TARGET_STYLE), end="")
    console.print()
    _print_figures(llm, num_tokens, perf_counter() - started_at)
    return _print_failure(chunk.error)


def _print_outputs(llm: "LLM", prompts: list[Any], params: list[SamplingParams], as_json: bool) -> int:
    start = perf_counter()
    with progress("generating", len(prompts) * (params[0].n or 1)) as advance:
        outputs = llm.generate(prompts, params, lambda chunk: advance() if chunk.finish_reason else None)
    seconds = perf_counter() - start
    console = stdout()
    for i, output in enumerate(outputs):
        if as_json:
            print(json.dumps(as_dict(output), ensure_ascii=False))
            continue
        samples = output.choices or [output]
        for number, sample in enumerate(samples, 1):
            sample_label = f" sample {number} of {len(samples)}" if output.choices else ""
            console.print(Text(f"[{i}]{sample_label}", DIM_STYLE))
            console.print(Text(sample.text))
    samples = [sample for output in outputs for sample in (output.choices or [output])]
    _print_figures(llm, sum(len(sample.token_ids) for sample in samples), seconds)
    return max((_print_failure(sample.error) for sample in samples), default=0)


def as_dict(output: Output) -> dict[str, Any]:
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "from_draft": output.from_draft,
        "logprobs": None if output.logprobs is None else [vars(entry) for entry in output.logprobs],
        "prompt_logprobs": None
        if output.prompt_logprobs is None
        else [None if entry is None else vars(entry) for entry in output.prompt_logprobs],
        "choices": [as_dict(choice) for choice in output.choices],
        "usage": vars(output.usage),
        "speculation": output.speculation.as_dict(),
        "error": output.error,
    }


def _print_figures(llm: "LLM", num_tokens: int, seconds: float) -> None:
    totals = llm.engine.totals
    speed = num_tokens / max(seconds, 1e-9)
    line = f"{num_tokens} token{'s' * (num_tokens != 1)} in {seconds:.2f} s, {speed:.0f} tokens/s"
    if totals.rounds:
        line += f", accept length {totals.accept_length:.2f} over {totals.rounds} round{'s' * (totals.rounds != 1)}"
    stderr().print(Text(line, DIM_STYLE))


def _print_failure(error: str | None) -> int:
    if error is None:
        return 0
    print(f"espalier: {error}", file=sys.stderr)
    return 1
