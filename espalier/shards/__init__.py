"""The part of a model that each rank holds, and the operations that join the ranks' results."""

from espalier.shards.base import WHOLE, Collectives, IndivisibleError, Part, Shards, Size, part_of, whole_part

__all__ = ["WHOLE", "Collectives", "IndivisibleError", "Part", "Shards", "Size", "part_of", "whole_part"]
