"""Run third-party clients against a server, and print how many requests each sent and how many failed.

Run it in a separate environment with the clients; --espalier is the command of the server (docs/development.md).  A
client that is not installed is skipped, with a line that says so.  Nothing is downloaded; tasks and tokenizers are
local.
"""

import argparse
import asyncio
import importlib
import importlib.metadata
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tests.server.bodies import BODIES  # noqa: E402

START_S = 300
CLIENT_S = 600
JDK, JDK_CLIENT = "JDK", ROOT / "scripts" / "JdkClient.java"
TOKENIZER = ROOT / "espalier" / "bundled" / "target"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
HI = [{"role": "user", "content": "def mean(xs):\n"}]
LONG = [{"role": "user", "content": "x " * 4000}]
# That of the bundled model, and with tools in the form of Hermes.
TEMPLATE = (
    "{{ bos_token }}{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}{{ '<|assistant|>' if m.role == 'assistant' else '<|user|>' }}{{ m.content }}"
    '{% for c in m.tool_calls or [] %}<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|end|>{% endfor %}<|assistant|>"
)
SHORT: dict[str, Any] = {"max_tokens": 8, "temperature": 0}


class Server(NamedTuple):
    """url: ends with /v1; folder: for the files of a client."""

    url: str
    folder: Path

    def counts(self) -> dict[int, int]:
        """The number of responses to POST requests so far, by status."""
        counts: dict[int, int] = {}
        with urllib.request.urlopen(f"{self.url.removesuffix('/v1')}/metrics", timeout=60) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith("espalier_http_requests_total{") and ("completions" in line or "responses" in line):
                    status = int(line.partition('status="')[2].partition('"')[0])
                    counts[status] = counts.get(status, 0) + int(float(line.rpartition(" ")[2]))
        return counts


class Client(NamedTuple):
    """package: its version is printed; "" for request bodies without their client, or JDK.

    refused: the number of responses that must be errors.
    """

    name: str
    package: str
    run: Callable[[Server], None]
    refused: int = 0


def jdk_client(server: Server) -> None:
    ran = subprocess.run(["java", JDK_CLIENT, server.url], capture_output=True, text=True, timeout=CLIENT_S)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-2000:]


def raises(kind: type[BaseException], call: Callable[..., Any], *values: Any, **fields: Any) -> None:
    """Raises AssertionError unless the call raises `kind`."""
    try:
        call(*values, **fields)
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


def openai_client(server: Server) -> None:
    openai: Any = importlib.import_module("openai")
    client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
    ask = {"model": "bundled", "messages": HI, **SHORT}
    whole = client.chat.completions.create(**ask).choices[0].message.content
    assert (
        "".join(c.choices[0].delta.content or "" for c in client.chat.completions.create(stream=True, **ask)) == whole
    )
    assert client.completions.create(model="bundled", prompt="def f(x):", **SHORT).choices[0].text

    async def ask_at_once() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as many:
            return await asyncio.gather(*(many.chat.completions.create(**ask) for _ in range(8)))

    assert {each.choices[0].message.content for each in asyncio.run(ask_at_once())} == {whole}
    raises(openai.NotFoundError, client.chat.completions.create, **ask | {"model": "other"})
    raises(openai.BadRequestError, client.chat.completions.create, **ask | {"messages": LONG})


def litellm_client(server: Server) -> None:
    litellm: Any = importlib.import_module("litellm")
    litellm.suppress_debug_info = True
    where = {"api_base": server.url, "api_key": "none", "num_retries": 0}
    for provider in ("openai", "hosted_vllm"):
        ask = {"model": f"{provider}/bundled", "messages": HI, **SHORT, **where}
        whole = litellm.completion(**ask).choices[0].message.content
        parts = litellm.completion(stream=True, **ask)
        assert "".join(part.choices[0].delta.content or "" for part in parts) == whole
        raises(litellm.ContextWindowExceededError, litellm.completion, **ask | {"messages": LONG})
        raises(litellm.NotFoundError, litellm.completion, **ask | {"model": f"{provider}/other"})
    text = litellm.text_completion(model="text-completion-openai/bundled", prompt="def f(x):", **SHORT, **where)
    assert text.choices[0].text


def langchain_client(server: Server) -> None:
    chat = importlib.import_module("langchain_openai").ChatOpenAI(
        model="bundled", base_url=server.url, api_key="none", max_retries=0, **SHORT
    )
    errors = importlib.import_module("langchain_core.exceptions")
    said = HI[0]["content"]
    assert "".join(part.content for part in chat.stream(said)) == chat.invoke(said).content
    assert len(chat.batch([said] * 4)) == 4
    raises(errors.ContextOverflowError, chat.invoke, LONG[0]["content"])


def llm_client(server: Server) -> None:
    models = [
        {"model_id": "chat", "model_name": "bundled", "api_base": server.url},
        {"model_id": "text", "model_name": "bundled", "api_base": server.url, "completion": True},
    ]
    (server.folder / "extra-openai-models.yaml").write_text(json.dumps(models))  # JSON is YAML
    environment = {"LLM_USER_PATH": str(server.folder), "OPENAI_API_KEY": "none"}
    options = ["-o", "max_tokens", "8", "-o", "temperature", "0"]
    for model in ("chat", "text"):
        for streamed in ([], ["--no-stream"]):
            command(["-m", "llm", "-m", model, *options, *streamed, "def mean(xs):"], environment)


def guidellm_client(server: Server) -> None:
    for route in ("/v1/completions", "/v1/chat/completions"):
        out = server.folder / "guidellm.json"
        parts = {
            "backend": f"kind=openai_http,target={server.url.removesuffix('/v1')},model=bundled,request_format={route}",
            "profile": "kind=concurrent,streams=4",
            "constraint": "kind=max_requests,count=16",
            "tokenizer": f"kind=huggingface_auto,model={TOKENIZER}",
            "data": "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
            "output": f"kind=json,path={out}",
        }
        flags = [part for name, value in parts.items() for part in (f"--{name}", value)]
        command(["-m", "guidellm", "run", *flags, "--disable-console"])
        [benchmark] = json.loads(out.read_text())["benchmarks"]
        found = benchmark["metrics"]["request_totals"]
        assert (found["successful"], found["errored"]) == (16, 0), found


GENERATE = {
    "output_type": "generate_until",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 8},
    "metric_list": [{"metric": "exact_match"}],
}
CHOOSE = {
    "output_type": "multiple_choice",
    "doc_to_choice": ["1", "2"],
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}],
}


def lm_eval_client(task: dict[str, Any], *models: str) -> Callable[[Server], None]:
    def run(server: Server) -> None:
        data = server.folder / "data.jsonl"
        data.write_text("".join(json.dumps({"question": f"x = {i}\ny =", "answer": i % 2}) + "\n" for i in range(8)))
        local = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
        whole = {"task": "local", **local, "doc_to_text": "{{question}}", **task}
        (server.folder / "local.yaml").write_text(json.dumps(whole))
        for model in models:
            path = "chat/completions" if "chat" in model else "completions"
            given = f"model=bundled,base_url={server.url}/{path},max_retries=1,num_concurrent=4"
            given += f",tokenizer_backend=huggingface,tokenizer={TOKENIZER}"
            chat = ["--apply_chat_template"] if "chat" in model else []
            flags = ["--tasks", "local", "--include_path", str(server.folder), *chat]
            command(["-m", "lm_eval", "run", "--model", model, "--model_args", given, *flags])

    return run


def bench_bodies(client: str) -> Callable[[Server], None]:
    def run(server: Server) -> None:
        for name, (path, body) in BODIES.items():
            if name.startswith(client):
                asked = urllib.request.Request(f"{server.url.removesuffix('/v1')}{path}", json.dumps(body).encode())
                asked.add_header("content-type", "application/json")
                with urllib.request.urlopen(asked, timeout=60) as answer:
                    assert answer.read().endswith(b"data: [DONE]\n\n")

    return run


WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": WEATHER}]
ASK: dict[str, Any] = {"model": "bundled", "messages": [{"role": "user", "content": "The weather?"}], "temperature": 0}


def weather(city: str, days: int) -> str:
    assert city in ("Rome", "Oslo") and days in (1, 2), (city, days)
    return f"sun in {city} for {days} days"


def openai_tools(server: Server) -> None:
    """Whole and streamed calls, their results, and the Responses API."""
    openai: Any = importlib.import_module("openai")
    client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
    forced = {**ASK, "tools": TOOLS, "tool_choice": "required", "max_tokens": 200}
    message = client.chat.completions.create(parallel_tool_calls=False, **forced).choices[0].message
    [call] = message.tool_calls
    result = weather(**json.loads(call.function.arguments))
    joined = ""
    for chunk in client.chat.completions.create(parallel_tool_calls=False, stream=True, **forced):
        for part in chunk.choices[0].delta.tool_calls or () if chunk.choices else ():
            joined += part.function.arguments
    assert joined == call.function.arguments
    history = [*ASK["messages"], message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    answer = client.chat.completions.create(
        **{**ASK, "messages": history, "tools": TOOLS, **SHORT, "tool_choice": "none"}
    )
    assert answer.choices[0].finish_reason in ("stop", "length")
    flat = [{"type": "function", "strict": True, **WEATHER}]
    named = {"type": "function", "name": "get_weather"}
    ask = {"model": "bundled", "input": "The weather?", "tools": flat, "tool_choice": named, "temperature": 0}
    [item] = client.responses.create(max_output_tokens=200, parallel_tool_calls=False, **ask).output
    result = weather(**json.loads(item.arguments))
    output = {"type": "function_call_output", "call_id": item.call_id, "output": result}
    items = [{"role": "user", "content": "The weather?"}, item, output]
    assert client.responses.create(model="bundled", input=items, max_output_tokens=8).status in (
        "completed",
        "incomplete",
    )


def litellm_tools(server: Server) -> None:
    litellm: Any = importlib.import_module("litellm")
    where = {"api_base": server.url, "api_key": "none", "num_retries": 0}
    named = {"type": "function", "function": {"name": "get_weather"}}
    ask = {**ASK, "model": "hosted_vllm/bundled", "tools": TOOLS, "tool_choice": named, "max_tokens": 200, **where}
    [call] = litellm.completion(parallel_tool_calls=False, **ask).choices[0].message.tool_calls
    assert weather(**json.loads(call.function.arguments))


def langchain_tools(server: Server) -> None:
    """An agent: a call, its result, and an answer."""
    chat = importlib.import_module("langchain_openai").ChatOpenAI(
        model="bundled", base_url=server.url, api_key="none", max_retries=0, max_tokens=200, temperature=0
    )
    messages = [("user", "The weather?")]
    caller = chat.bind_tools(TOOLS, tool_choice="required", parallel_tool_calls=False)
    asked = caller.invoke(messages)
    streamed = None
    for chunk in caller.stream(messages):
        streamed = chunk if streamed is None else streamed + chunk
    [call] = asked.tool_calls
    assert streamed is not None and [each["args"] for each in streamed.tool_calls] == [call["args"]]
    result = {"role": "tool", "tool_call_id": call["id"], "content": weather(**call["args"])}
    answer = chat.bind(max_tokens=8).bind_tools(TOOLS, tool_choice="none").invoke([*messages, asked, result])
    assert not answer.tool_calls


def instructor_tools(server: Server) -> None:
    """A pydantic model as a forced call, whole and streamed."""
    instructor: Any = importlib.import_module("instructor")
    openai: Any = importlib.import_module("openai")
    typing: Any = importlib.import_module("typing")
    pydantic: Any = importlib.import_module("pydantic")
    trip = pydantic.create_model("Trip", city=(typing.Literal["Rome", "Oslo"], ...), days=(typing.Literal[1, 2], ...))
    plain = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
    client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
    ask = {**ASK, "response_model": trip, "max_tokens": 200, "max_retries": 0}
    found = client.chat.completions.create(**ask)
    assert weather(found.city, found.days)
    *_, last = client.chat.completions.create_partial(**ask)
    assert (last.city, last.days) == (found.city, found.days)


def mcp_loop(server: Server) -> None:
    """Tools as an MCP server lists them, called until the model has no more calls."""
    openai: Any = importlib.import_module("openai")
    client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
    listed = [{"name": WEATHER["name"], "description": WEATHER["description"], "inputSchema": WEATHER["parameters"]}]
    tools = [
        {
            "type": "function",
            "function": {"name": t["name"], "description": t["description"], "parameters": t["inputSchema"]},
        }
        for t in listed
    ]
    messages, choice, num_calls = [*ASK["messages"]], "required", 0
    for _ in range(3):
        ask = {**ASK, "messages": messages, "tools": tools, "tool_choice": choice, "max_tokens": 200}
        message = client.chat.completions.create(parallel_tool_calls=False, **ask).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            content = [{"type": "text", "text": weather(**json.loads(call.function.arguments))}]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
            num_calls += 1
        choice = "auto"
    assert num_calls >= 1


CLIENTS = (
    Client("openai", "openai", openai_client, refused=2),
    Client("litellm", "litellm", litellm_client, refused=4),
    Client("langchain-openai", "langchain-openai", langchain_client, refused=1),
    Client("llm", "llm", llm_client),
    Client("guidellm", "guidellm", guidellm_client),
    Client("lm-eval, generation", "lm_eval", lm_eval_client(GENERATE, "local-completions", "local-chat-completions")),
    Client("lm-eval, log-likelihood", "lm_eval", lm_eval_client(CHOOSE, "local-completions")),
    Client("Java's HttpClient", JDK, jdk_client, refused=1),
    Client("vLLM's bench, bodies", "", bench_bodies("vLLM")),
    Client("SGLang's bench, bodies", "", bench_bodies("SGLang")),
    Client("tools, openai", "openai", openai_tools),
    Client("tools, litellm", "litellm", litellm_tools),
    Client("tools, langchain-openai", "langchain-openai", langchain_tools),
    Client("tools, instructor", "instructor", instructor_tools),
    Client("tools, MCP", "openai", mcp_loop),
)


def command(arguments: list[str], environment: dict[str, str] | None = None) -> None:
    """Run a module of this environment.  Raises AssertionError with the end of its output if it fails."""
    whole = os.environ | OFFLINE | (environment or {})
    ran = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=whole, timeout=CLIENT_S)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-2000:]


@contextmanager
def serving(espalier: str, flags: str = "") -> Iterator[Server]:
    """A server of the bundled model on a free port.  flags: further ones of `espalier serve`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        server = Server(f"http://127.0.0.1:{port}/v1", Path(folder))
        log, template = Path(folder) / "server.log", Path(folder) / "tools.jinja"
        template.write_text(TEMPLATE)
        with log.open("w") as lines:
            given = ["serve", "bundled", "--port", str(port), "--chat-template", str(template), *shlex.split(flags)]
            process = subprocess.Popen([*shlex.split(espalier), *given], stdout=lines, stderr=lines)
        try:
            end = time.monotonic() + START_S
            while not _answers(server):
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"the server did not start:\n{log.read_text()[-2000:]}")
                time.sleep(0.2)
            yield server
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def _answers(server: Server) -> bool:
    try:
        return bool(server.counts() is not None)
    except OSError:
        return False


def version_of(package: str) -> str:
    """Raises PackageNotFoundError for one that is not installed."""
    if package != JDK:
        return importlib.metadata.version(package) if package else "-"
    if shutil.which("java") is None:
        raise importlib.metadata.PackageNotFoundError(JDK)
    return subprocess.run(["java", "--version"], capture_output=True, text=True, check=True).stdout.split()[1]


def row(client: Client, server: Server) -> tuple[str, str, int, int]:
    """(client, version, requests, failures).  A failure is an unexpected error response, or a client that raised."""
    version = version_of(client.package)
    before, failures = server.counts(), 0
    try:
        client.run(server)
    except Exception as error:  # each client has its own exceptions
        print(f"{client.name}: {type(error).__name__}: {error}", file=sys.stderr)
        failures = 1
    after = server.counts()
    asked = {status: after[status] - before.get(status, 0) for status in after}
    refused = sum(count for status, count in asked.items() if status != 200)
    return client.name, version, sum(asked.values()), max(failures, abs(refused - client.refused))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--espalier", default="espalier", help="the command that starts the server (espalier)")
    parser.add_argument("--flags", default="", help="further flags of the server, such as '--replicas 2'")
    parser.add_argument("--only", nargs="*", metavar="CLIENT", help="only clients whose names begin with one of these")
    asked = parser.parse_args()
    os.environ.update(OFFLINE)
    chosen = [c for c in CLIENTS if asked.only is None or c.name.startswith(tuple(asked.only))]
    with serving(asked.espalier, asked.flags) as server:
        print("| client | version | requests | failures |\n| --- | --- | --- | --- |")
        failed = 0
        for client in chosen:
            try:
                name, version, requests, failures = row(client, server)
            except importlib.metadata.PackageNotFoundError:
                print(f"| {client.name} | not installed | 0 | - |")
                continue
            failed += failures
            print(f"| {name} | {version} | {requests} | {failures} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
