"""What reaches the learner of a server: nothing without the flag, and nothing that a client keeps back."""

import os
from types import SimpleNamespace

import pytest
import zmq

from espalier.cli.main import make_parser
from espalier.cli.serve import serve_worker
from espalier.errors import EspalierError
from espalier.learn.folder import KeptTexts
from espalier.request import ResolvedParams
from espalier.server import protocol
from espalier.server.protocol import StartEngine, SubmitPrompts, SubmittedPrompt
from espalier.server.worker import EngineWorker
from tests.learn.test_learner import served as one_engine
from tests.server.serving import exists, serving


class Recorded:
    """A learner that only remembers."""

    figures = None

    def __init__(self):
        self.kept = []

    def keep_text(self, request):
        self.kept.append(request.id)

    def swap_between_steps(self, engine):
        pass


def submitted(name, private=False, n=1):
    return SubmittedPrompt(
        name, [1, 2, 3], ResolvedParams(temperature=0.0, max_tokens=4, n=n), 0, False, private=private
    )


@pytest.mark.parametrize("learns", [True, False])
def test_private_requests_are_not_kept(learns):
    learner = Recorded() if learns else None
    with zmq.Context() as context, context.socket(zmq.PAIR) as frontend, context.socket(zmq.PAIR) as socket:
        frontend.bind("inproc://learning")
        socket.connect("inproc://learning")
        worker = EngineWorker(socket, one_engine(), StartEngine({}, 0.05, "info", False), os.getppid(), learner)
        frontend.send(
            protocol.encode(SubmitPrompts([submitted("a", n=2), submitted("b", private=True), submitted("c")]))
        )
        frontend.send(protocol.encode(protocol.Shutdown()))
        worker._receive_messages()
        while worker.llm.engine.has_work:
            worker._send(worker.llm.step())
    assert learner is None or sorted(learner.kept) == ["a.0", "a.1", "c.0"]


def test_a_server_with_the_flag_keeps_what_clients_let_it_and_leaves_no_process(tmp_path):
    folder = tmp_path / "learn"
    flags = ("--learn", str(folder))
    body = {"model": "bundled", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    with serving(tmp_path, "bundled", "--draft", "bundled", *flags, copied=True) as served:
        assert "learning is on" in served.log.read_text()
        engine = served.engine_pid()
        for path, more in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ("/v1/responses", {"input": "a", "max_output_tokens": 20}),
        ):
            own = {name: value for name, value in body.items() if "output" not in str(more) or name != "max_tokens"}
            for store in ({"store": False}, {"store": True}):
                status, _, answer = served.request(path, {**own, **more, **store})
                assert status == 200, answer
        served.until(lambda: served.metric("learn_texts_total") == 2)
        assert served.metric("learn_swaps_total") == 0 and served.metric("learn_bytes") > 4 * 40
    assert not exists(engine)
    kept_texts = KeptTexts(folder / "sample", 2**20)
    assert sum(kept_texts.texts_per_kind.values()) == 2 and kept_texts.num_tokens > 40, "a stop writes what is queued"
    assert sorted(each.name for each in folder.iterdir()) == ["drafts", "learn.json", "lock", "sample"]


def test_a_server_without_the_flag_has_nothing_of_it(served):
    served.request("/v1/completions", {"model": "bundled", "prompt": "a", "max_tokens": 20})
    assert "espalier_learn" not in served.request("/metrics")[2]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--learn-bytes", "100000"], "--learn-bytes is for --learn"),
        (["--learn", ""], "--learn="),
        (["--learn", "{new}", "--learn-tokens", "0"], "--learn-tokens=0"),
        (["--learn", "{new}", "--api-key", "a", "--api-key", "b"], "several --api-key"),
        (["--learn", "{new}", "--replicas", "2"], "leave out --replicas"),
    ],
)
def test_flags_that_do_not_go_with_it_are_refused(flags, said, tmp_path):
    new = tmp_path / "new"
    args = make_parser().parse_args(["serve", "bundled", *(flag.format(new=new) for flag in flags)])
    with pytest.raises(EspalierError, match=said):
        serve_worker(args, {}, "bundled")
    assert not new.exists()


def test_a_model_without_files_is_refused(tmp_path):
    args = make_parser().parse_args(["serve", "bundled", "--learn", str(tmp_path / "new")])
    with pytest.raises(EspalierError, match="synthetic"):
        serve_worker(SimpleNamespace(**vars(args)), {}, "bundled", "lab.shape_worker")
