"""What `espalier serve --replicas` promises, shown: `python scripts/ray_shows.py answers` (docs/deploy.md).

answers: with 1, 2 and 4 replicas, one killed while it streams, and a rolling update under load, each request is
answered, and with one engine's text.  prefixes: prompt tokens found in prefix caches, by router.  scaling: replicas
under load and after it.  cost: CPU time of each process for a token, and the API server's most tokens a second, with
engines that are stand-ins (scripts/front_cost.py).  Needs the extra `ray`; the bundled model runs on the CPU.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, NamedTuple

from front_cost import CHAT, LENGTHS, cpu_seconds, post

from espalier.serve_ray.build import ReplicaOptions, Service, application, parse_service
from espalier.server.client import ClientOptions
from lab.bench.server import free_port, wait_until_served

APP = "espalier"
SERVE = "serve"
# float64, so that an answer does not depend on the batch.
ENGINE: dict[str, Any] = {"dtype": "float64", "max_batch": 4, "max_context": 512, "page_size": 16, "num_pages": 400}
POWER_OF_TWO = "ray.serve._private.request_router.pow_2_router.PowerOfTwoChoicesRequestRouter"
NUM_CLIENTS = 8
STREAMS = 16
PROMPTS = [f"def {name}_{i}(values):\n" for i in range(8) for name in ("mean", "total", "largest", "sorted_copy")]
MAX_TOKENS = 48


class Outcome(NamedTuple):
    """kind: "whole", "error" (after its first token), "refused" (an error response) or "unanswered"."""

    kind: str
    text: str
    cached: int = 0
    prompt: int = 0


def ask(port: int, prompt: str, max_tokens: int = MAX_TOKENS) -> Outcome:
    """One streamed completion."""
    body = {"model": "bundled", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    connection = HTTPConnection("127.0.0.1", port, timeout=120)
    text, usage = "", dict[str, Any]()
    try:
        sent = json.dumps(body | {"stream_options": {"include_usage": True}})
        connection.request("POST", "/v1/completions", sent, {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            return Outcome("refused", answer.read().decode())
        for line in answer:
            if line.startswith(b"data: [DONE]"):
                return Outcome("whole", text, usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"])
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    return Outcome("error", event["error"]["message"])
                text += "".join(choice["text"] for choice in event["choices"])
                usage = event.get("usage") or usage
    except (OSError, HTTPException) as error:
        return Outcome("unanswered", repr(error))
    finally:
        connection.close()
    return Outcome("unanswered", text)


@contextmanager
def cluster() -> Iterator[int]:
    """A Ray cluster on this machine.  Yields the port of Serve's proxy."""
    import ray
    from ray import serve
    from ray.serve.config import HTTPOptions

    # Ray gives its processes a low priority, with which a busy machine starves them.
    os.environ.setdefault("RAY_worker_niceness", "0")
    port = free_port()
    ray.init(address="local", include_dashboard=False, object_store_memory=2**28, log_to_driver=False)
    try:
        serve.start(http_options=HTTPOptions(port=port))
        yield port
    finally:
        serve.shutdown()
        ray.shutdown()


def deploy(service: Service) -> None:
    """Deploy, or update what is deployed.  Returns when all of it runs."""
    from ray import serve

    serve.run_many([serve.RunTarget(application(service), name=APP, route_prefix="/")])


def service(replicas: Any, **more: Any) -> Service:
    return parse_service(
        {"model": "bundled", "device": "cpu", "replicas": replicas, "log_level": "warning", **ENGINE, **more}
    )


def replica_names() -> list[str]:
    """Names of the actors of the engine's replicas."""
    import ray

    named = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
    return sorted(name for name in named if name.startswith(f"SERVE_REPLICA::{APP}#engine#"))


def kill_one() -> None:
    import ray

    ray.kill(ray.get_actor(replica_names()[0], namespace=SERVE))


class Load:
    """Clients that ask one prompt after the other until `stop`."""

    def __init__(self, port: int, prompts: Sequence[str], num_clients: int = NUM_CLIENTS):
        self.port, self.prompts = port, prompts
        self.outcomes: list[tuple[str, Outcome]] = []
        self._ending = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(num_clients)]

    def _run(self, seed: int) -> None:
        chosen = random.Random(seed)
        while not self._ending.is_set():
            prompt = chosen.choice(self.prompts)
            self.outcomes.append((prompt, ask(self.port, prompt)))

    def start(self) -> "Load":
        for each in self._threads:
            each.start()
        return self

    def reach(self, count: int) -> None:
        while len(self.outcomes) < count:
            time.sleep(0.05)

    def stop(self) -> None:
        self._ending.set()
        for each in self._threads:
            each.join()


def one_engine(prompts: Sequence[str]) -> dict[str, str]:
    """The texts of one engine, offline."""
    from espalier import LLM, SamplingParams

    with LLM("bundled", device="cpu", **ENGINE) as llm:
        outputs = llm.generate(list(prompts), SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
    return {prompt: output.text for prompt, output in zip(prompts, outputs, strict=True)}


def show_answers(counts: Sequence[int], num_requests: int) -> bool:
    """Returns whether every request was answered and no text differs."""
    wanted, is_good = one_engine(PROMPTS), True
    print(
        "| replicas | event | requests | whole | equal to one engine's | ended with an error | refused | unanswered |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for count in counts:
        events: list[tuple[str, Callable[[], None]]] = [
            ("none", lambda: None),
            ("a replica is killed", kill_one),
            ("a rolling update", lambda: deploy(service(count, seed=1))),  # noqa: B023
        ]
        with cluster() as port:
            deploy(service(count))
            for name, event in events:
                load = Load(port, PROMPTS).start()
                load.reach(num_requests // 2)
                event()
                load.reach(max(num_requests, len(load.outcomes) + num_requests // 2))
                load.stop()
                kinds = Counter(outcome.kind for _, outcome in load.outcomes)
                equal = sum(outcome.text == wanted[prompt] for prompt, outcome in load.outcomes)
                cells = (
                    len(load.outcomes),
                    kinds["whole"],
                    equal,
                    kinds["error"],
                    kinds["refused"],
                    kinds["unanswered"],
                )
                print("|", " | ".join(map(str, (count, name, *cells))), "|", flush=True)
                is_good = is_good and equal == kinds["whole"] and not kinds["unanswered"] and not kinds["refused"]
                for text in {outcome.text for _, outcome in load.outcomes if outcome.kind in ("error", "refused")}:
                    print(f"  {text}", file=sys.stderr)
                _wait_for(count)
    return is_good


def _wait_for(count: int) -> None:
    """Wait until this number of replicas runs."""
    while _running() != count:
        time.sleep(0.2)


def _running() -> int:
    from ray import serve

    found = serve.status().applications[APP].deployments["engine"]
    return int(found.replica_states.get("RUNNING", 0))


def show_prefixes(num_replicas: int) -> None:
    """Families of prompts that share a start of about 300 tokens, in a random order."""
    families = [
        f"# module {i}\n" + "".join(f"def helper_{i}_{j}(x, y):\n    return x * {j} + y - {i}\n\n" for j in range(12))
        for i in range(8)
    ]
    prompts = [f"{start}def use_{j}(x):\n" for start in families for j in range(12)]
    random.Random(0).shuffle(prompts)
    # Ray's processes find scripts/random_router.py.
    os.environ["PYTHONPATH"] = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
    print("| replicas | router | prompt tokens | found in a prefix cache |\n| --- | --- | --- | --- |")
    routers = (
        (1, "one engine", None),
        (num_replicas, "random", "random_router.RandomRouter"),
        (num_replicas, "Ray's power of two", POWER_OF_TWO),
        (num_replicas, "ours", None),
    )
    for count, name, router in routers:
        with cluster() as port:
            deploy(service(count, **({} if router is None else {"router": router})))
            with ThreadPoolExecutor(4) as clients:
                outcomes = list(clients.map(lambda prompt: ask(port, prompt, 4), prompts))
        assert all(outcome.kind == "whole" for outcome in outcomes)
        total, cached = sum(outcome.prompt for outcome in outcomes), sum(outcome.cached for outcome in outcomes)
        print(f"| {count} | {name} | {total} | {cached} ({cached / total:.0%}) |", flush=True)


def show_scaling(high: int) -> None:
    """Replicas each 2 s: 40 s of load, and then none until one replica is left."""
    # What a replica sends the controller for its decisions.
    os.environ.setdefault("RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "1")
    delays = {"upscale_delay_s": 3.0, "downscale_delay_s": 10.0, "look_back_period_s": 4.0}
    with cluster() as port:
        deploy(service(f"1:{high}", tokens_per_replica=150, autoscaling=delays))
        load, began, ended = Load(port, PROMPTS).start(), time.monotonic(), None
        while ended is None or (_running() > 1 and time.monotonic() - ended < 90):
            if ended is None and time.monotonic() - began > 40:
                load.stop()
                ended = time.monotonic()
            print(f"{time.monotonic() - began:5.0f} s  load {'on ' if ended is None else 'off'}  {_running()} replicas")
            time.sleep(2)
        kinds = Counter(outcome.kind for _, outcome in load.outcomes)
        print(f"{time.monotonic() - began:5.0f} s  load off  {_running()} replicas")
        print(f"{len(load.outcomes)} requests: {dict(kinds)}")


def show_cost(counts: Sequence[int], repeats: int) -> None:
    """Streams of stand-in engines, which take no time to compute."""
    print("| API server | path of a token | µs of CPU a token | tokens a second |\n| --- | --- | --- | --- |")
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "scripts.front_cost", "--front", str(port)], stderr=subprocess.DEVNULL
    )
    try:
        wait_until_served(process, port)
        _print_cost("espalier serve", port, {"front": [process.pid]}, repeats)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    for count in counts:
        plain = service(count, served_model_name="fake")
        model = replace(
            plain.models[0],
            client=ClientOptions(worker_module="scripts.front_cost", log_level="warning"),
            replicas=ReplicaOptions(count, count),
        )
        with cluster() as port:
            deploy(replace(plain, models=(model,)))
            parts = {"proxy": "ray::ProxyActor", "front": f"ray::ServeReplica:{APP}:front"}
            parts["replicas"] = f"ray::ServeReplica:{APP}:engine"
            pids = {
                name: [pid for pid, title in _descendants() if title.startswith(each)] for name, each in parts.items()
            }
            _print_cost(f"Ray Serve, {count} replicas", port, pids, repeats)


def _print_cost(name: str, port: int, pids: dict[str, list[int]], repeats: int) -> None:
    """CPU time a token is the difference between long and short streams."""
    connections = [HTTPConnection("127.0.0.1", port, timeout=120) for _ in range(STREAMS)]
    spent: dict[int, dict[str, float]] = {}
    for length in LENGTHS:
        body = {"model": "fake", "messages": CHAT, "max_tokens": length, "stream": True, "ignore_eos": True}
        with ThreadPoolExecutor(STREAMS) as clients:
            for turn in range(repeats + 1):
                if turn == 1:
                    before, began = (
                        {each: sum(map(cpu_seconds, found)) for each, found in pids.items()},
                        time.monotonic(),
                    )
                list(clients.map(lambda each: post(each, "/v1/chat/completions", body), connections))  # noqa: B023
        seconds = time.monotonic() - began
        spent[length] = {each: sum(map(cpu_seconds, found)) - before[each] for each, found in pids.items()}
    tokens = repeats * STREAMS * (LENGTHS[1] - LENGTHS[0])
    costs = {each: 1e6 * (spent[LENGTHS[1]][each] - spent[LENGTHS[0]][each]) / tokens for each in pids}
    path = ", ".join(f"{each} {cost:.0f}" for each, cost in costs.items())
    rate = repeats * STREAMS * LENGTHS[1] / seconds
    print(f"| {name} | {path} | {sum(costs.values()):.0f} | {rate:.0f} |", flush=True)


def _descendants() -> list[tuple[int, str]]:
    """(pid, title) of all processes that this one started, at any depth."""
    parents, titles = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            titles[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return [(pid, titles[pid]) for pid in sorted(found)]


def main() -> int:
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("show", choices=("answers", "prefixes", "scaling", "cost"))
    parser.add_argument(
        "--replicas", default="1,2,4", help="answers, cost: numbers of replicas; others: the last of them"
    )
    parser.add_argument("--requests", type=int, default=100, help="answers: requests for each event, at least")
    parser.add_argument("--repeats", type=int, default=4, help=f"cost: turns of {STREAMS} streams")
    asked = parser.parse_args()
    counts = [int(each) for each in asked.replicas.split(",")]
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if asked.show == "answers":
        return 0 if show_answers(counts, asked.requests) else 1
    if asked.show == "prefixes":
        show_prefixes(counts[-1])
    elif asked.show == "scaling":
        show_scaling(counts[-1])
    else:
        show_cost(counts, asked.repeats)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
