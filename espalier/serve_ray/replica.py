"""An engine replica: an actor of Ray Serve with one engine process.

The engine runs in its own process, so that Ray's threads and the messages of many streams do not delay its steps.  If
the engine process ends, the actor exits at once, and Ray Serve starts a new actor.
"""

import asyncio
import logging
import os
import zlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from espalier.config import is_unresolved
from espalier.errors import EspalierError
from espalier.request import sample_seed
from espalier.server import logs, protocol
from espalier.server.client import ClientOptions, EngineClient
from espalier.server.protocol import EngineBusy, EngineGone, SubmittedPrompt

log = logging.getLogger("espalier.server")
# A replica whose engine has ended waits for this time before it exits, so that the last messages are sent.
LAST_MESSAGES_WAIT_S = 0.5
EXIT_CODE = 1


class EngineReplica:
    """The actor of one engine.  settings: keyword arguments of EngineConfig.  name: the replica's name; "" for the name
    in Ray Serve.  exit_process: called with EXIT_CODE when the engine has ended."""

    # Ray Serve awaits this constructor before it calls other methods.
    async def __init__(  # type: ignore[misc]
        self, settings: Mapping[str, Any], options: ClientOptions, name: str = "", exit_process: Any = os._exit
    ):
        logs.set_up_logging(options.log_level, options.log_json)
        self.name = name or _name_in_serve()
        self.exit_actor = exit_process
        self.client = EngineClient(with_own_seed(settings, self.name), options)
        # By prompt name: the number of tokens still to compute.  The prompt's tokens count until the first output
        # arrives.  Output tokens (up to max_tokens) count until they arrive.
        self._open_tokens: dict[str, int] = {}
        await self.client.start()
        self._exit_task = asyncio.create_task(self._exit_with_engine())

    async def get_model_info(self) -> bytes:
        """Returns an encoded EngineReady message."""
        assert self.client.model_info is not None
        return protocol.encode(protocol.EngineReady(self.client.model_info, self.client.config))

    async def generate(self, message: bytes, _routing_hint: Any = None) -> AsyncIterator[bytes]:
        """Run a prompt.  Yields encoded protocol messages: StepOutput, and PromptRefused or EngineFailed for an error.

        message: an encoded SubmittedPrompt.  _routing_hint: for the router.  Closing the iterator aborts the prompt."""
        submitted = msgspec.msgpack.decode(message, type=SubmittedPrompt)
        try:
            generation = self.client.submit([submitted.prompt], submitted)
        except EngineGone as error:
            yield protocol.encode(protocol.EngineFailed(str(error), refused=False))
            return
        log.debug("%s has the prompt", self.name, extra=logs.log_extra(submitted.name))
        assert self.client.model_info is not None
        params, max_output = submitted.params, self.client.model_info.max_context - len(submitted.prompt)
        num_outstanding = params.n * (max_output if params.max_tokens is None else min(max_output, params.max_tokens))
        self._open_tokens[submitted.name] = len(submitted.prompt) + num_outstanding
        try:
            async for parts in generation.iter_parts(None):
                for part in parts:
                    part.name = submitted.name
                    num_outstanding -= len(part.output.token_ids)
                self._open_tokens[submitted.name] = max(num_outstanding, 0)
                yield protocol.encode(protocol.StepOutput(parts))
        except EngineGone as error:
            yield protocol.encode(protocol.EngineFailed(str(error), refused=False))
        except EspalierError as error:
            yield protocol.encode(protocol.PromptRefused(submitted.name, str(error), isinstance(error, EngineBusy)))
        finally:
            self._open_tokens.pop(submitted.name, None)
            generation.close()

    def open_tokens(self) -> int:
        """Returns the number of tokens still to compute: prompts without output, and outputs up to their limits."""
        return sum(self._open_tokens.values())

    async def engine_stats(self) -> bytes:
        """Returns the engine's metrics (EngineStats), with the replica's name as a label."""
        [stats] = self.client.engine_stats()
        return msgspec.msgpack.encode(replace(stats, labels={"replica": self.name}))

    # Ray Serve's hooks

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {"open_tokens": self.open_tokens()}

    async def check_health(self) -> None:
        """Raises an error if the engine process has ended.  Ray Serve calls this hook."""
        self.client.require_running()

    async def __del__(self) -> None:
        await self.client.close()

    async def _exit_with_engine(self) -> None:
        why = await self.client.wait_until_ended()
        if why is not None:
            log.error("replica %s ends with its engine: %s", self.name, why)
            await asyncio.sleep(LAST_MESSAGES_WAIT_S)
            await self.client.close()
            self.exit_actor(EXIT_CODE)


def with_own_seed(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns the settings with another seed for each replica name, so that replicas sample different texts."""
    seed: Any = settings.get("seed")
    if is_unresolved(seed):
        return dict(settings)
    return {**settings, "seed": sample_seed(seed, 1 + zlib.crc32(name.encode()))}


def _name_in_serve() -> str:
    """Returns the replica's name in Ray Serve."""
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id)
