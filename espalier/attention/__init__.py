"""Attention backends by name."""

import torch

from espalier.attention.base import Attention, Backend, Nodes, Prefix, Support
from espalier.attention.reference import ReferenceBackend
from espalier.attention.sdpa import SdpaBackend
from espalier.attention.triton import TritonBackend
from espalier.errors import EspalierError

BACKENDS: dict[str, type[Backend]] = {b.support.name: b for b in (TritonBackend, SdpaBackend, ReferenceBackend)}


def backend(name: str) -> Backend:
    """The backend of that name.  Raises EspalierError naming those there are."""
    if name not in BACKENDS:
        raise EspalierError(f"attention={name!r} is unknown; use one of {', '.join(BACKENDS)}, or 'auto'")
    return BACKENDS[name]()


def default_backend(device: str, dtype: torch.dtype | None = None) -> str:
    """The name of the backend that "auto" stands for: the first that runs on that kind of device, in that dtype."""
    fits = (made.support for made in BACKENDS.values() if device in made.support.devices)
    return next(support.name for support in fits if dtype is None or dtype in support.dtypes)


__all__ = ["BACKENDS", "Attention", "Backend", "Nodes", "Prefix", "Support", "backend", "default_backend"]
