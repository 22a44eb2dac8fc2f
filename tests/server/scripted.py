"""A server whose engine says what a script tells it: for tests of what is read from an output.

As a program it answers like `espalier serve bundled --port N`, for scripts/clients.py: a conversation with tools gets a
call of the first one, and one with a result of a tool gets text.
"""

import argparse
import asyncio
import json
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from espalier.inputs import ModelInfo, make_detokenizer
from espalier.request import OutputChunk, ResolvedParams
from espalier.server import protocol
from espalier.server.api import ApiOptions, make_app
from espalier.server.client import ClientOptions, EngineClient
from espalier.server.connections import OpenConnections
from espalier.server.frontend import FrontendOptions, ModelFrontend
from espalier.server.http1 import Connection
from espalier.server.protocol import OutputPart, SubmitPrompts, SubmittedPrompt
from espalier.stats import SpeculationStats, Usage
from espalier.text import Tokenizer
from tests.server.serving import Served
from tests.tool_calls.families import FAMILIES, Family

# From the prompt's text and the parameters to the output's text.
Script = Callable[[str, ResolvedParams], str]


class ScriptedClient(EngineClient):
    """size: tokens in a part.  submitted: parameters of the requests so far."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, script: Script, size: int):
        super().__init__({}, ClientOptions())
        self.tokenizer, self.script, self.size = tokenizer, script, size
        self.submitted: list[ResolvedParams] = []
        self.model_info = ModelInfo(str(folder), tokenizer.num_tokens, 100_000, (tokenizer.hf.eos_token_id,))
        self.config, self.state = {"max_batch": 8}, "ready"

    def _send(self, message: protocol.MessageToEngine) -> None:
        for submit in message.prompts if isinstance(message, SubmitPrompts) else ():
            self.submitted.append(submit.params)
            asyncio.get_running_loop().create_task(self._answer(submit))

    async def _answer(self, submit: SubmittedPrompt) -> None:
        params = submit.params
        text = self.script(self.tokenizer.decode(submit.prompt, skip_special_tokens=False), params)
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        is_cut_off = params.max_tokens is not None and params.max_tokens <= len(tokens)
        tokens = tokens[: params.max_tokens] if is_cut_off else [*tokens, self.tokenizer.hf.eos_token_id]
        for index in range(params.n):
            sink = make_detokenizer(self.tokenizer, submit.prompt, params)
            for start in range(0, len(tokens), self.size):
                part = tokens[start : start + self.size]
                is_last = start + self.size >= len(tokens)
                text, stopped = "", None
                if submit.detokenize:
                    for at, token in enumerate(part):
                        # A stop token has no text.
                        stopped = None if token == self.tokenizer.hf.eos_token_id else sink.push_token(token)
                        if stopped is not None:
                            part = part[: at + 1]
                            break
                    text = sink.take_text(final=is_last or stopped is not None)
                reason = "stop" if stopped else ("length" if is_cut_off else "stop") if is_last else None
                piece = OutputChunk(
                    f"{submit.name}.{index}",
                    index,
                    part,
                    text,
                    [False] * len(part),
                    finish_reason=reason,
                    stop_reason=stopped,
                )
                if reason is None:
                    self._deliver(OutputPart(submit.name, piece))
                    await asyncio.sleep(0)
                    continue
                usage = Usage(len(submit.prompt), start + len(part), 0)
                self._deliver(OutputPart(submit.name, piece, usage, SpeculationStats()))
                break


@contextmanager
def scripted(
    folder: Path, family: Family, script: Script, size: int = 3, port: int = 0, **options: str
) -> Iterator[tuple[Served, ScriptedClient]]:
    """A server in a thread of this process."""
    tokenizer = family.tokenizer()
    tokenizer.hf.save_pretrained(folder)
    ready, started = threading.Event(), {}

    def run() -> None:
        asyncio.run(serve())

    async def serve() -> None:
        client = ScriptedClient(folder, tokenizer, script, size)
        frontend = ModelFrontend(client, FrontendOptions(("bundled",), **options))
        app, _ = make_app(frontend, ApiOptions())
        connections = OpenConnections(frontend.metrics, None, None, None)
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        server = await loop.create_server(lambda: Connection(app, connections), "127.0.0.1", port)
        started.update(client=client, port=server.sockets[0].getsockname()[1])
        started["end"] = lambda: loop.call_soon_threadsafe(ended.set)
        ready.set()
        async with server:
            await ended.wait()
            for connection in connections:
                connection.transport.abort()
        await frontend.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(60)
    try:
        yield Served(None, started["port"], folder / "no-log"), started["client"]
    finally:
        started["end"]()
        thread.join(60)


def answer(prompt: str, params: ResolvedParams) -> str:
    """A call of the first tool of the prompt with the values that its schema asks for, or text after a result."""
    first = next((json.loads(line) for line in prompt.splitlines() if line.startswith('{"type": "function"')), None)
    if first is None or "<|im_start|>tool" in prompt:
        return "def f(): pass"
    function = first["function"]
    arguments = {
        name: value_of(schema) for name, schema in function.get("parameters", {}).get("properties", {}).items()
    }
    call = json.dumps({"name": function["name"], "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def value_of(schema: dict) -> object:
    if "enum" in schema:
        return schema["enum"][0]
    return {"string": "x", "integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}}[schema["type"]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*")
    parser.add_argument("--port", type=int)
    asked, _ = parser.parse_known_args(arguments)
    with (
        tempfile.TemporaryDirectory() as folder,
        scripted(Path(folder), FAMILIES["hermes"], answer, port=asked.port),
    ):
        threading.Event().wait()


if __name__ == "__main__":
    main()
