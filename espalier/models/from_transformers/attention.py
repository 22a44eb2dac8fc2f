"""How our attention function answers a model of transformers: it hands each call to what runs in this thread.

Who runs is no argument of a model's layers, so it stands in a context variable for the time of a forward pass.  What a
class raises becomes a refusal with a reason: it is another's code, and may raise anything.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from espalier.errors import EspalierError, one_line

# As transformers' AttentionInterface knows us.
NAME = "espalier"


@dataclass(frozen=True)
class Call:
    """A layer's attention.  q: [B, heads, Q, k_size]; k, v: [B, kv_heads, Q, size] of the new rows.

    scale: factor of q·k; window: as LayerSpec.window; softcap: scores are bounded to ±softcap by a tanh; sink: [heads],
    as Attention.attend takes it; masked: whether the model brings a mask of its own.
    """

    module: nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float | None
    window: int | None
    softcap: float | None
    sink: Tensor | None
    masked: bool


class Attends(Protocol):
    """What answers the attention calls of a forward pass.

    inputs: by layer, the captured inputs, which the pass adds.  live: [B · Q] bool, of rows that go to experts.
    """

    inputs: dict[int, Tensor]

    @property
    def live(self) -> Tensor | None: ...

    def __call__(self, call: Call) -> Tensor:
        """[B, Q, heads, v_size]."""
        ...


RUNNING: ContextVar[Attends] = ContextVar("the attention of the forward pass that runs")


@contextmanager
def attending(run: Attends) -> Iterator[None]:
    """Let `run` answer the attention calls of this thread."""
    token = RUNNING.set(run)
    try:
        yield
    finally:
        RUNNING.reset(token)


def register() -> None:
    """Make NAME known to transformers.

    It is not registered as a kind of mask.  So transformers makes none, and does not look for packed sequences in the
    positions, which it would do on the host.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attend)


def _attend(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    call = Call(module, q, k, v, scaling, sliding_window or None, softcap or None, s_aux, attention_mask is not None)
    return RUNNING.get()(call), None


@contextmanager
def refusing(reason: str, *, with_kind: bool = False) -> Iterator[None]:
    """Raise any error as EspalierError: the reason, and in brackets the error's text, behind its kind if asked."""
    try:
        yield
    except EspalierError:
        raise
    except Exception as error:
        kind = f"{type(error).__name__}: " if with_kind else ""
        raise EspalierError(f"{reason} ({kind}{one_line(error)})") from None
