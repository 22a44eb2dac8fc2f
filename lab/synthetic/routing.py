"""Planted routing: how much the experts of neighbouring tokens agree, by weights alone.

A router's logits are the sum of two random parts.  The first reads r_t, so it differs from token to token.  The second
reads a planted part of the embedding, the topic, which the tokens of a stretch of text share (chain.py).  The
routing correlation is the correlation of the logits of two tokens of a topic.  At 0 each token has random experts, and
embeddings have no topic; at 1 a topic's tokens go to the same experts.  Layers draw their routers
independently.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from espalier.errors import EspalierError
from espalier.models.config import ModelConfig

if TYPE_CHECKING:
    from lab.synthetic.target import RandomTensors, TargetTensors

# Dimensions of the planted part.  The directions of topics are random in it.
TOPIC_SIZE = 32
# Standard deviation of a router's logits.
LOGIT_STD = 1.0


def check_correlation(correlation: float, config: ModelConfig, shape: str) -> None:
    """Raises EspalierError for a correlation that has no meaning for this model."""
    if not 0 <= correlation <= 1:
        raise EspalierError(f"routing_correlation={correlation} is not supported; use 0 to 1")
    if correlation and config.experts is None:
        raise EspalierError(f"routing_correlation={correlation} is for mixtures of experts, and {shape} is none; use 0")


def topic_directions(draw: "RandomTensors", count: int) -> Tensor:
    """[count, TOPIC_SIZE] random directions of length 1, drawn on the CPU."""
    generator = draw.generator("topics", torch.device("cpu"))
    return _scale_rows_to_length(torch.randn(count, TOPIC_SIZE, generator=generator), 1.0).to(draw.device)


def router_weight(target: "TargetTensors", name: str, num_experts: int) -> Tensor:
    """[E, H] float32.  The rows of each part have one length, so that no expert is preferred."""
    hidden, planted, correlation = target.config.hidden_size, target.planted, target.correlation
    own = planted.remove_planted(target.draw.normal(name, num_experts, hidden, 1.0, torch.float32))
    # r_t has the length that the planted parts leave, in random directions of about `hidden` dimensions.
    own = _scale_rows_to_length(own, LOGIT_STD * math.sqrt((1 - correlation) * hidden) / target.random_part_length)
    if not correlation:
        return own
    read = target.draw.normal(f"{name}/topic", num_experts, TOPIC_SIZE, 1.0, torch.float32)
    read = _scale_rows_to_length(read, LOGIT_STD * math.sqrt(correlation * TOPIC_SIZE) / planted.length["topic"])
    return own + read @ planted.directions_of_part("topic", TOPIC_SIZE).T


def _scale_rows_to_length(rows: Tensor, length: float) -> Tensor:
    return rows * (length / rows.norm(dim=1, keepdim=True))
