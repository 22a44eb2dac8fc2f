"""Attention backends by name."""

from espalier.attention.base import Attention, Backend, Nodes, Prefix, Support
from espalier.attention.reference import ReferenceBackend
from espalier.attention.sdpa import SdpaBackend
from espalier.errors import EspalierError

BACKENDS: dict[str, type[Backend]] = {b.support.name: b for b in (SdpaBackend, ReferenceBackend)}


def backend(name: str) -> Backend:
    """The backend of that name.  Raises EspalierError naming those there are."""
    if name not in BACKENDS:
        raise EspalierError(f"attention={name!r} is unknown; use one of {', '.join(BACKENDS)}, or 'auto'")
    return BACKENDS[name]()


def default_backend(device: str) -> str:
    """The name of the backend that "auto" stands for: the first that runs on that kind of device."""
    return next(name for name, made in BACKENDS.items() if device in made.support.devices)


__all__ = ["BACKENDS", "Attention", "Backend", "Nodes", "Prefix", "Support", "backend", "default_backend"]
