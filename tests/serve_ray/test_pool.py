"""A pool of replicas: what is tried elsewhere, what ends with an error, and what an API server learns of its
replicas."""

import asyncio

import msgspec
import pytest

from espalier.errors import EspalierError
from espalier.inputs import ModelInfo
from espalier.request import OutputChunk, ResolvedParams
from espalier.serve_ray import pool as pools
from espalier.serve_ray.pool import MAX_REPLICAS_TRIED, NO_REPLICA_REASON, EnginePool
from espalier.server import protocol
from espalier.server.metrics import Metrics
from espalier.server.protocol import (
    SHUTTING_DOWN,
    EngineFailed,
    EngineGone,
    EngineReady,
    EngineReport,
    EngineStats,
    OutputPart,
    PromptRefused,
    StepOutput,
    SubmittedPrompt,
)
from espalier.stats import Usage
from tests.serve_ray.handles import Handle, Lost

PROMPT = list(range(40))


class Scripted:
    """A replica that says what its script says, an item at a time: tokens, or an exception or message to end with."""

    def __init__(self, name, *script, slots=4):
        self.name, self.script, self.slots = name, list(script), slots
        self.asked = []
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def get_model_info(self):
        return protocol.encode(EngineReady(ModelInfo("m", 100, 64), {"max_batch": self.slots, "page_size": 16}))

    async def engine_stats(self):
        return msgspec.msgpack.encode(EngineStats({"replica": self.name}, True, 0, EngineReport(num_waiting=3), {1: 2}))

    async def generate(self, message, route):
        submit = msgspec.msgpack.decode(message, type=SubmittedPrompt)
        self.asked.append(submit)
        for item in self.script:
            await self.go_on.wait()
            if isinstance(item, Exception):
                raise item
            if isinstance(item, list):
                yield harvest(submit.name, item)
            else:
                yield protocol.encode(item)
        yield harvest(submit.name, [9], Usage(len(submit.prompt), 1))


def harvest(name, tokens, usage=None):
    reason = None if usage is None else "stop"
    return protocol.encode(StepOutput([OutputPart(name, OutputChunk(name, 0, tokens, finish_reason=reason), usage)]))


def pooled(*replicas, **more):
    return EnginePool(Handle({each.name: each for each in replicas}), "m", 8, more.get("share", 1), is_replica_lost)


def is_replica_lost(error):
    return isinstance(error, Lost)


async def started(*replicas, **more):
    pool = pooled(*replicas, **more)
    await pool.start()
    return pool


async def tokens_of(pool, prompt=PROMPT):
    generation = pool.submit([prompt], SubmittedPrompt("req", [], ResolvedParams(), 0, False))
    try:
        return [part.output.token_ids async for parts in generation.iter_parts(None) for part in parts]
    finally:
        generation.close()


def test_a_prompt_whose_replica_is_lost_before_its_first_token_is_tried_elsewhere():
    async def run():
        for end in (Lost("died"), EngineFailed("the engine stopped", refused=False)):
            bad, good = Scripted("a", end), Scripted("b", [1])
            pool = await started(bad, good)
            # The bad one has the pages, so it is asked first.
            pool.handle.chooser.record_sent(pools.prefix_hashes(PROMPT, 16), 0, "a", "r")
            pool.handle.chooser.num_open_samples["a"] = 0
            bad.generate, seen = failing_once(bad, pool), bad.asked
            assert await tokens_of(pool) == [[1], [9]]
            assert len(seen) == 1 and len(pool.handle.calls) == 2 and pool.open_samples == 0
            await pool.close()

    def failing_once(bad, pool):
        original = bad.generate

        def generate(*of):
            pool.handle.replicas = {name: each for name, each in pool.handle.replicas.items() if each is not bad}
            return original(*of)

        return generate

    asyncio.run(run())


@pytest.mark.parametrize("end", [Lost("died"), EngineFailed("the engine stopped", refused=False)])
def test_a_prompt_with_a_token_ends_with_an_error(end):
    async def run():
        pool = await started(Scripted("a", [1], end))
        generation = pool.submit([PROMPT], SubmittedPrompt("req", [], ResolvedParams(), 0, False))
        found = []
        with pytest.raises(EngineGone, match=r"gone|stopped"):
            async for parts in generation.iter_parts(None):
                found += parts
        assert [part.output.token_ids for part in found] == [[1]]
        assert len(pool.handle.calls) == 1 and pool.open_samples == 0
        await pool.close()

    asyncio.run(run())


def test_it_is_tried_only_so_often():
    async def run():
        bad = Scripted("a", Lost("died"))
        pool = await started(bad)
        with pytest.raises(EngineGone, match="the replica is gone"):
            await tokens_of(pool)
        assert len(bad.asked) == MAX_REPLICAS_TRIED
        await pool.close()

    asyncio.run(run())


def test_a_replica_that_dies_behind_the_last_token_has_answered():
    async def run():
        replica = Scripted("a")

        async def generate(message, route):
            name = msgspec.msgpack.decode(message, type=SubmittedPrompt).name
            yield harvest(name, [9], Usage(1, 1))
            raise Lost("died")

        replica.generate = generate
        pool = await started(replica)
        assert await tokens_of(pool) == [[9]] and len(pool.handle.calls) == 1
        await pool.close()

    asyncio.run(run())


def test_a_stream_that_ends_early_is_a_loss():
    async def run():
        replica = Scripted("a")

        async def generate(message, route):
            yield harvest(msgspec.msgpack.decode(message, type=SubmittedPrompt).name, [1])

        replica.generate = generate
        pool = await started(replica)
        with pytest.raises(EngineGone, match="ended the stream early"):
            await tokens_of(pool)
        await pool.close()

    asyncio.run(run())


def test_a_refusal_is_not_tried_elsewhere():
    async def run():
        replica = Scripted("a", PromptRefused("req-0", "the prompt can never run"))
        pool = await started(replica, Scripted("b", PromptRefused("req-0", "the prompt can never run")))
        with pytest.raises(EspalierError, match="can never run"):
            await tokens_of(pool)
        assert len(pool.handle.calls) == 1
        await pool.close()

    asyncio.run(run())


def test_a_defect_of_a_replica_is_not_hidden_as_a_loss():
    async def run():
        pool = await started(Scripted("a", KeyError("x")))
        with pytest.raises(KeyError):
            await tokens_of(pool)
        assert len(pool.handle.calls) == 1
        await pool.close()

    asyncio.run(run())


def test_closing_a_generation_cancels_its_calls():
    async def run():
        replica = Scripted("a", [1], [2])
        replica.go_on.clear()
        pool = await started(replica)
        generation = pool.submit([PROMPT, PROMPT], SubmittedPrompt("req", [], ResolvedParams(n=2), 0, False))
        await asyncio.sleep(0.01)
        assert pool.open_samples == 4 and len(replica.asked) == 2
        assert {call[1].num_samples for call in pool.handle.calls} == {2}
        generation.close()
        await asyncio.sleep(0.01)
        assert pool.open_samples == 0 and all(call[2].cancelled for call in pool.handle.calls)
        await pool.close()

    asyncio.run(run())


def test_figures_of_another_version_do_not_end_the_reading(monkeypatch):
    """While a cluster is upgraded, an API server may meet replicas of the version before."""
    monkeypatch.setattr(pools, "POLL_INTERVAL_S", 0.01)

    async def run():
        other = Scripted("b")
        pool = await started(Scripted("a"), other)

        async def old_figures():
            return msgspec.msgpack.encode({"name": "b"})

        current, other.engine_stats = other.engine_stats, old_figures
        await asyncio.sleep(0.05)
        assert pool.num_replicas == 1
        other.engine_stats = current
        await asyncio.sleep(0.05)
        assert pool.num_replicas == 2
        await pool.close()

    asyncio.run(run())


def test_the_replicas_are_known_by_their_figures(monkeypatch):
    monkeypatch.setattr(pools, "POLL_INTERVAL_S", 0.01)

    async def run():
        pool = await started(Scripted("a"), Scripted("b"), share=0.5)
        assert (pool.state, pool.unavailable_reason, pool.num_slots, pool.max_slots) == ("ready", "", 4, 16)
        lines = Metrics([pool]).exposition_text().decode().splitlines()
        assert 'espalier_waiting_requests{model="m",replica="b"} 3.0' in lines
        assert 'espalier_abort_steps_count{model="m",replica="a"} 2.0' in lines
        assert sum(line.startswith("# TYPE espalier_waiting_requests ") for line in lines) == 1
        replicas, pool.handle.replicas = pool.handle.replicas, {}
        await asyncio.sleep(0.05)
        # Requests wait for a replica; the health check says that there is none.
        assert (pool.state, pool.unavailable_reason, pool.num_slots) == ("starting", NO_REPLICA_REASON, 2)
        pool.require_running()
        pool.handle.replicas = replicas
        await asyncio.sleep(0.05)
        assert pool.state == "ready"
        await pool.close()
        assert (pool.state, pool.unavailable_reason) == ("closed", SHUTTING_DOWN)
        with pytest.raises(EngineGone, match="shutting down"):
            pool.submit([PROMPT], SubmittedPrompt("req", [], ResolvedParams(), 0, False))

    asyncio.run(run())
