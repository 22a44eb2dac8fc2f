"""The part of a model that each rank holds, and the operations that join the ranks' results."""

from espalier.shards.base import SINGLE_RANK, Collectives, RankPart, Shards, SizeOrPart, as_rank_part, whole_part

__all__ = ["SINGLE_RANK", "Collectives", "RankPart", "Shards", "SizeOrPart", "as_rank_part", "whole_part"]
