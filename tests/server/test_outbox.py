"""Which prompts go to the engine process in one message."""

import asyncio
import socket
from contextlib import ExitStack

import pytest

from espalier.request import ResolvedParams
from espalier.server import client as module
from espalier.server.client import ClientOptions, EngineClient, PromptBatcher
from espalier.server.protocol import AbortPrompt, SubmitPrompts, SubmittedPrompt


def prompt(name, num_tokens=10):
    return SubmittedPrompt(str(name), [1] * num_tokens, ResolvedParams(), 0, False)


@pytest.fixture(autouse=True)
def never_late(monkeypatch):
    """The clock of a busy machine decides nothing."""
    monkeypatch.setattr(module, "MAX_SEND_DELAY_S", 60.0)


def sent_by(work, tokens_per_prefill=1000):
    """The names in each message, after `work(outbox)` and until nothing waits."""
    messages = []

    async def run():
        box = PromptBatcher(lambda submits: messages.append([submit.name for submit in submits]))
        box.tokens_per_prefill = tokens_per_prefill
        await work(box)
        while box._unsent_prompts:
            await asyncio.sleep(0)

    asyncio.run(run())
    return messages


def test_requests_that_wait_in_sockets_leave_together():
    async def work(box):
        loop = asyncio.get_running_loop()

        async def handle(name):
            box.add(prompt(name))

        with ExitStack() as stack:
            for i in range(4):
                client, server = (stack.enter_context(each) for each in socket.socketpair())
                client.send(b"x")
                loop.add_reader(
                    server, lambda i=i, server=server: (loop.remove_reader(server), loop.create_task(handle(i)))
                )
            # The first request was read before the others had come.
            box.add(prompt("first"))
            await asyncio.sleep(0.05)

    [names] = sent_by(work)
    assert names[0] == "first" and sorted(names[1:]) == ["0", "1", "2", "3"]


def test_a_full_prefill_pass_leaves_at_once():
    async def work(box):
        for i in range(5):
            box.add(prompt(i))
        assert len(box._unsent_prompts) == 1

    assert sent_by(work, tokens_per_prefill=20) == [["0", "1"], ["2", "3"], ["4"]]


def test_prompts_leave_when_they_have_waited_long_enough(monkeypatch):
    monkeypatch.setattr(module, "MAX_SEND_DELAY_S", 0.0)

    async def work(box):
        for i in range(3):
            box.add(prompt(i))

    assert sent_by(work) == [["0"], ["1"], ["2"]]


def test_the_rest_of_a_request_comes_after_all_prompts_have_left():
    order = []

    async def handle(box, name, turns):
        for _ in range(turns):
            await asyncio.sleep(0)
        box.add(prompt(name))
        await box.wait_until_sent()
        order.append(name)

    async def work(box):
        send = box.send
        box.send = lambda submits: (order.append("sent"), send(submits))
        # The last one fills a pass.
        handled = asyncio.gather(handle(box, 0, 0), handle(box, 1, 2), handle(box, 2, 4), handle(box, 3, 4))
        await asyncio.wait_for(handled, 10)

    assert sent_by(work, tokens_per_prefill=40) == [["0", "1", "2", "3"]]
    assert order[0] == "sent" and sorted(order[1:]) == [0, 1, 2, 3]


def test_nobody_waits_for_prompts_that_never_leave():
    async def work(box):
        box.add(prompt("x"))
        waiting = asyncio.create_task(box.wait_until_sent())
        await asyncio.sleep(0)
        assert [submit.name for submit in box.clear()] == ["x"]
        await asyncio.wait_for(waiting, 10)

    assert sent_by(work) == []


def test_an_abort_follows_its_prompt(monkeypatch):
    async def run():
        client, sent = EngineClient({}, ClientOptions()), []
        monkeypatch.setattr(client, "_send", sent.append)
        client.state, client._prompt_batcher.tokens_per_prefill = "ready", 1000
        generation = client.submit([[1], [2]], SubmittedPrompt("x", [], ResolvedParams(), 0, False))
        assert sent == []
        generation.close()
        assert [type(message) for message in sent] == [SubmitPrompts, AbortPrompt, AbortPrompt]
        assert [submit.name for submit in sent[0].prompts] == [message.name for message in sent[1:]]
        # Nothing of an engine that is gone reaches the next one.
        client.submit([[1]], SubmittedPrompt("y", [], ResolvedParams(), 0, False))
        client._fail_all("it is gone")
        client.state = "closed"
        await asyncio.sleep(0.01)
        assert len(sent) == 3 and client._prompt_batcher._unsent_prompts == []
        await client.close()

    asyncio.run(run())
