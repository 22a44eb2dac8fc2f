"""Chat templates for the front: rendered in the template process, never on the event loop."""

import asyncio
import json
from typing import Any

from espalier.chat import Rendering
from espalier.errors import EspalierError
from espalier.server.aside import Aside, AsideFailed
from espalier.server.errors import full
from espalier.server.template_process import BEYOND

# Wall time of one rendering.  The process itself limits its CPU time, but for work that Python cannot interrupt.
MAX_WALL_S = 30.0
MAX_WAITING = 64


class Templates:
    """hf: a Hugging Face tokenizer with a chat template."""

    def __init__(self, hf: Any):
        self.source = hf.chat_template, dict(hf.special_tokens_map)
        self._aside = Aside("template", "-m", "espalier.server.template_process")
        self._turn = asyncio.Lock()
        self._num_open = 0

    async def start(self) -> None:
        """Start the process, whose imports take a second or two, before the first conversation needs it."""
        await self._aside.start()

    async def render(self, rendering: Rendering) -> str:
        """Raises EspalierError if the template refuses or does not end, ApiError if too many wait."""
        if self._num_open > MAX_WAITING:
            raise full(f"{MAX_WAITING} conversations are already waiting for the chat template")
        data = json.dumps({"source": self.source, "rendering": rendering}).encode()
        self._num_open += 1
        try:
            async with self._turn:
                answer = json.loads(await self._aside.exchange(data, MAX_WALL_S))
        except AsideFailed:
            raise EspalierError(BEYOND.format(f"{MAX_WALL_S:g} s and the memory that it may take")) from None
        finally:
            self._num_open -= 1
        if "error" in answer:
            raise EspalierError(answer["error"])
        return str(answer["text"])

    async def close(self) -> None:
        await self._aside.close()
