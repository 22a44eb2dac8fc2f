"""Ray Serve itself: `espalier serve --replicas` on this machine.  scripts/ray_shows.py has the longer runs."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager

import pytest

from tests.server.serving import ENGINE, FLAGS, ROOT, Served, answers

pytest.importorskip("ray", reason="the extra `ray` is not installed: pip install -e '.[ray]'")
pytestmark = pytest.mark.ray
START_S = 180


def command(*flags):
    device = () if "--device" in flags else ("--device", "cpu")
    return [sys.executable, "-m", "espalier", "serve", "bundled", *device, *flags]


def environment():
    # RAY_ADDRESS=local is a cluster of its own, whatever else runs on this machine.
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local"}


@contextmanager
def replicated(folder, *flags):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / "server.log"
    with log.open("w") as lines:
        whole = command("--port", str(port), *FLAGS, *flags)
        process = subprocess.Popen(whole, stdout=lines, stderr=lines, env=environment(), cwd=ROOT, text=True)
    served = Served(process, port, log)
    try:
        served.until(lambda: answers(served), START_S)
        yield served
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(90) == 0, log.read_text()[-3000:]
        finally:
            if process.poll() is None:
                process.kill()


def test_two_replicas_answer_as_one_engine(tmp_path, llm):
    from espalier import SamplingParams

    with replicated(tmp_path, "--replicas", "2", "--max-queue", "4") as served:
        prompts = [f"def f_{i}(x):\n" for i in range(8)]
        body = {"model": "bundled", "prompt": prompts, "max_tokens": 12, "temperature": 0}
        status, headers, answer = served.request("/v1/completions", body, x_request_id="mine")
        wanted = llm.generate(prompts, SamplingParams(max_tokens=12, temperature=0))
        assert status == 200 and [choice["text"] for choice in answer["choices"]] == [each.text for each in wanted]
        assert headers.get_all("x-request-id") == ["mine"] and answer["id"] == "cmpl-mine"
        # Two engines of four slots, and four places in the queue.
        assert ENGINE["max_batch"] == 4
        many = served.request("/v1/completions", body | {"n": 2, "max_tokens": 1})
        assert many[0] == 400 and "16 samples and the server holds 12 at most" in many[2]["error"]["message"]
        served.until(lambda: served.request("/metrics")[2].count("\nespalier_engine_up{") == 2)
        served.until(lambda: served.metric("open_samples") == 0)
        missing = served.request("/v1/completions", {"model": "other", "prompt": "x"})
        assert missing[0] == 404 and missing[2]["error"]["code"] == "model_not_found"
        assert "[mine] POST /v1/completions 200" in served.log.read_text()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--replicas", "2", "--draft", "/no/draft"), "a replica cannot load: draft='/no/draft' is not a directory"),
        (("--replicas", "1", "--num-pages", "100000000"), "a replica cannot load: num_pages=100000000"),
        (("--replicas", "2", "--device", "cuda"), "--replicas 2 needs 2 GPUs and the Ray cluster has 0"),
    ],
)
def test_what_cannot_be_served_is_one_line(flags, says):
    ran = subprocess.run(command(*flags, "--port", "0"), capture_output=True, env=environment(), cwd=ROOT, text=True)
    assert ran.returncode == 2
    [line] = [line for line in ran.stderr.splitlines() if line.startswith("espalier: ")]
    assert says in line


def test_a_port_in_use_is_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        whole = command("--replicas", "1", "--port", port)
        ran = subprocess.run(whole, capture_output=True, env=environment(), cwd=ROOT, text=True)
    assert ran.returncode == 2 and f"--port {port} cannot be used" in ran.stderr
