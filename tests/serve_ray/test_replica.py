"""Engine replicas with a tiny model behind the API server, with a handle of this process in Ray's place."""

import asyncio
import os
import signal

import httpx
import pytest

from espalier.request import ResolvedParams
from espalier.serve_ray.pool import EnginePool
from espalier.serve_ray.replica import EngineReplica, with_own_seed
from espalier.server.api import ApiOptions, make_app
from espalier.server.client import ClientOptions
from espalier.server.frontend import FrontendOptions, ModelFrontend
from espalier.server.protocol import EngineGone, SubmittedPrompt
from tests import warm
from tests.serve_ray.handles import Handle
from tests.server.serving import ENGINE, TREE
from tests.worded import worded

PROMPTS = [f"def f_{i}(x):\n" for i in range(6)]
ASK = {"model": "bundled", "max_tokens": 12, "temperature": 0}


def lost(error):
    return False


class Replica(EngineReplica):
    """Ray Serve awaits __del__ once; Python calls it too."""

    def __del__(self):
        pass


class Group:
    """Replicas and their pool, in one event loop.  left: exit codes of replicas that ended their actor."""

    def __init__(self, *names):
        self.names = names

    async def __aenter__(self):
        self.left = []
        target, draft = map(str, worded())
        settings = {"model": target, "draft": draft, **ENGINE, "speculation": TREE}
        self.replicas = {}
        for name in self.names:
            replica = self.replicas[name] = Replica.__new__(Replica)
            await replica.__init__(settings, ClientOptions(), name, self.left.append)
        self.handle = Handle(dict(self.replicas))
        self.pool = EnginePool(self.handle, "bundled", len(self.names), 1, lost)
        await self.pool.start()
        return self

    async def __aexit__(self, *_):
        await self.pool.close()
        for replica in self.replicas.values():
            await EngineReplica.__del__(replica)


@pytest.mark.parametrize("names", [("a",), pytest.param(("a", "b"), marks=pytest.mark.full)], ids="".join)
def test_the_front_answers_over_replicas_as_over_one_engine(llm, names, monkeypatch):
    """Which replica is asked is tested in test_pool.py, without engines.  An engine finds its imports done."""
    monkeypatch.setattr(asyncio, "create_subprocess_exec", warm.copied_engines(asyncio.create_subprocess_exec))

    async def run():
        async with Group(*names) as group:
            frontend = ModelFrontend(group.pool, FrontendOptions(("bundled",)))
            app, _ = make_app(frontend, ApiOptions())
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                answers = await asyncio.gather(
                    *(client.post("/v1/completions", json={**ASK, "prompt": prompt}) for prompt in PROMPTS),
                    client.post("/v1/completions", json={**ASK, "prompt": PROMPTS}),
                    client.post("/v1/completions", json={**ASK, "prompt": "x", "logit_bias": {"999999": 1}}),
                )
            await frontend.close()
            return [answer.json() for answer in answers], {call[0] for call in group.handle.calls}

    *each, together, refused = asyncio.run(run())[0]
    wanted = [output.text for output in llm.generate(PROMPTS, max_tokens(12))]
    assert [answer["choices"][0]["text"] for answer in each] == wanted
    assert [choice["text"] for choice in together["choices"]] == wanted
    assert refused["error"]["type"] == "invalid_request_error"


def max_tokens(count):
    from espalier import SamplingParams

    return SamplingParams(max_tokens=count, temperature=0)


@pytest.mark.full
def test_the_engine_of_a_replica_dies(llm):
    """Its streams end with an error, prompts without a token run elsewhere, and the replica ends its actor."""

    async def run():
        async with Group("a", "b") as group:
            prompt = llm.inputs.prompt_tokens("def f(x):\n")
            params = ResolvedParams(temperature=0.0, max_tokens=400, ignore_eos=True)
            streamed = group.pool.submit([prompt], SubmittedPrompt("long", [], params, 0, False))
            parts = streamed.iter_parts(None)
            await anext(parts)
            name = group.handle.calls[0][0]
            replica = group.replicas[name]
            assert 0 < replica.open_tokens() < 400
            assert replica.record_autoscaling_stats() == {"open_tokens": replica.open_tokens()}
            os.kill(replica.client.process.pid, signal.SIGKILL)
            with pytest.raises(EngineGone, match="killed by signal 9"):
                async for _ in parts:
                    pass
            with pytest.raises(EngineGone):
                await replica.check_health()
            # It has this prompt's pages, so it is asked first, until Ray takes it away.
            few = ResolvedParams(temperature=0.0, max_tokens=4)
            waiting = group.pool.submit([prompt], SubmittedPrompt("next", [], few, 0, False))
            del group.handle.replicas[name]
            tokens = [
                t
                for parts in [p async for p in waiting.iter_parts(None)]
                for part in parts
                for t in part.output.token_ids
            ]
            await asyncio.sleep(0.6)
            assert not replica.client._socket_folder.exists()
            return tokens, group.left, replica.open_tokens()

    tokens, left, queued = asyncio.run(run())
    assert tokens == llm.generate(["def f(x):\n"], max_tokens(4))[0].token_ids
    assert left == [1] and queued == 0


def test_replicas_with_one_seed_draw_apart():
    """A random seed, the default, is each engine's own."""
    assert with_own_seed({"max_batch": 2}, "a") == {"max_batch": 2}
    seeds = [with_own_seed({"seed": 7}, name)["seed"] for name in ("a", "b", "a")]
    assert seeds[0] == seeds[2] != seeds[1] and all(0 <= seed < 2**63 for seed in seeds)
