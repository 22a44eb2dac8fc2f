"""Each rank's part of a model, and how ranks join their results."""

from espalier.shards.base import WHOLE, Collectives, Part, Shards, Size, on_every_rank, part_of

__all__ = ["WHOLE", "Collectives", "Part", "Shards", "Size", "on_every_rank", "part_of"]
