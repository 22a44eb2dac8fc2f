"""The host waits for results alone: one graph launch a round, and no synchronisation on the way there."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from espalier import LLM, SamplingParams
from espalier.engine.engine import Engine
from espalier.engine.executor import LaunchHandle
from espalier.engine.launch_input import LaunchInput
from espalier.request import Request
from tests.gpu.conftest import FIGURES, PROFILE
from tests.gpu.engines import DeviceSetup, make_executor
from tests.gpu.traffic import mixed, run_staggered

pytestmark = pytest.mark.gpu

SETUP = DeviceSetup(
    page_size=16, topk=4, steps=4, num_draft_tokens=16, max_batch=6, max_context=160, chunk_size=32, graph_batch=4
)
LAUNCH = "espalier.launch"
ROUNDS = 32
# What would hold the host until the device has come so far.
SYNCS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy", "cudaFree", "cudaMalloc")


@contextmanager
def no_sync() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def forbid_syncs(engine: Engine) -> Counter[str]:
    """Around every launch from now on; what ran, by kind."""
    executor, seen = make_executor(engine), Counter[str]()
    launch = executor.launch

    def launching(launch_input: LaunchInput) -> LaunchHandle:
        reports = any(n is not None for n in (*launch_input.num_logprobs, launch_input.prompt_rows))
        asked = "with logprobs" if reports else ""
        how = "eager" if executor.graph_of(launch_input) is None else "graph"
        kind = f"{how} prefill" if launch_input.is_prefill else how
        seen[f"{kind} {asked}".strip()] += 1
        seen["admissions"] += len(launch_input.slot_inits)
        with no_sync():
            return launch(launch_input)

    executor.launch = launching  # type: ignore[method-assign]
    return seen


def finish(engine: Engine, requests: Sequence[Request]) -> None:
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()


@pytest.mark.parametrize("algorithm", ["eagle3", "ngram", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_no_launch_synchronises(algorithm, dtype, put_on_record):
    """Prefill passes, rounds as graphs, above the largest graph and with log-probabilities, long prompts admitted."""
    setup = DeviceSetup(**{**vars(SETUP), "algorithm": algorithm, "dtype": dtype})
    engine = (setup.plain() if algorithm == "none" else setup).engine()
    # First runs may compile kernels and load libraries, which is nobody's steady state.
    requests = [*mixed(12, max_tokens=12), *mixed(6, max_tokens=12, logprobs=3), *mixed(6, longest=120, max_tokens=8)]
    requests += mixed(4, longest=120, max_tokens=8, prompt_logprobs=3)
    for i, r in enumerate(requests):
        r.id, r.arrival_index = f"r{i}", i
    finish(engine, requests[:2])
    seen = forbid_syncs(engine)
    captured = make_executor(engine).captured_passes
    passes = ("graph prefill", "graph prefill with logprobs") if captured else ("eager prefill",)
    # Two alone, in a graph with log-probabilities: the staggered ones may never be so few together.
    finish(engine, requests[12:14])
    run_staggered(engine, [*requests[2:12], *requests[14:]], every=1)
    kinds = {"eager prefill with logprobs", "graph", "graph with logprobs", "eager", *passes}
    assert kinds <= set(seen)
    put_on_record(FIGURES, f"sync debug mode 'error', {algorithm} {dtype}: {dict(seen)}")


def test_the_debug_mode_would_raise():
    with no_sync(), pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(1, device="cuda").item()


# The profiler's own account, of steady rounds of the bundled model.


@dataclass(frozen=True)
class Trace:
    """events: of a Chrome trace, those with a duration."""

    events: list[dict[str, Any]]

    @classmethod
    def of(cls, profiled: Any, path: Path) -> "Trace":
        profiled.export_chrome_trace(str(path))
        return cls([event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"])

    def named(self, category: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event.get("cat") == category]

    def calls_within(self, name: str) -> list[list[dict[str, Any]]]:
        """Of the CUDA runtime and driver, on the same thread, within each range of that name."""
        splits = sorted((e for e in self.named("user_annotation") if e["name"] == name), key=lambda e: e["ts"])
        calls = self.calls
        return [
            [call for call in calls if call["tid"] == r["tid"] and r["ts"] <= call["ts"] <= r["ts"] + r["dur"]]
            for r in splits
        ]

    @property
    def calls(self) -> list[dict[str, Any]]:
        return [*self.named("cuda_runtime"), *self.named("cuda_driver")]


def profiled_rounds(llm: LLM, path: Path) -> Trace:
    """ROUNDS rounds of four requests, the launches of each in a range of their own."""
    engine, executor = llm.engine, make_executor(llm.engine)
    launch = executor.launch

    def launching(launch_input: LaunchInput) -> LaunchHandle:
        with record_function(LAUNCH):
            return launch(launch_input)

    greedy = SamplingParams(temperature=0.0, ignore_eos=True)
    for group in llm._make_requests([[5 + 7 * i, 9, 11, 4] for i in range(4)], greedy, streamed=False):
        engine.add(group[0])
    for _ in range(24):
        engine.step()
    executor.launch = launching  # type: ignore[method-assign]
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for _ in range(ROUNDS):
            engine.step()
        torch.cuda.synchronize()
    executor.launch = launch  # type: ignore[method-assign]
    return Trace.of(profiled, path)


def lines_of(trace: Trace) -> list[str]:
    """What the profiler says, for the summary."""
    launches = trace.calls_within(LAUNCH)
    graphs = [sum(call["name"] == "cudaGraphLaunch" for call in launch) for launch in launches]
    anywhere = Counter(call["name"] for call in trace.calls)
    copied = Counter((event["name"], event["args"]["stream"]) for event in trace.named("gpu_memcpy"))
    kernels = Counter(event["args"]["stream"] for event in trace.named("kernel"))
    return [
        f"{len(launches)} launches at steady state, cudaGraphLaunch in each: {graphs}",
        f"CUDA calls within the launches: {dict(Counter(call['name'] for launch in launches for call in launch))}",
        f"CUDA calls in all, the closing cudaDeviceSynchronize of the profile included: {dict(anywhere)}",
        *(f"stream {stream}: {count} x {name}" for (name, stream), count in sorted(copied.items(), key=str)),
        *(f"stream {stream}: {count} kernels" for stream, count in sorted(kernels.items())),
    ]


def test_a_round_is_one_graph_launch_and_the_host_waits_for_results_alone(tmp_path, put_on_record):
    with LLM("bundled", device="cuda", max_batch=4, max_context=1024, num_pages=320) as llm:
        trace = profiled_rounds(llm, tmp_path / "trace.json")
    put_on_record(PROFILE, lines_of(trace))
    launches = trace.calls_within(LAUNCH)
    assert len(launches) == ROUNDS
    for launch in launches:
        calls = Counter(call["name"] for call in launch)
        assert calls["cudaGraphLaunch"] == 1
        assert not set(SYNCS) & set(calls)
        # Of the copy three launches before, which has been read.
        assert calls["cudaEventSynchronize"] <= 1
    [computing] = {event["args"]["stream"] for event in trace.named("kernel")}
    back = [event for event in trace.named("gpu_memcpy") if "DtoH" in event["name"]]
    assert len(back) == ROUNDS and computing not in {event["args"]["stream"] for event in back}
