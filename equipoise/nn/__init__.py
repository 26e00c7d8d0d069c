"""Layers for equilibrium cells and around them."""

from equipoise.nn.attention import RelativeAttention
from equipoise.nn.dropout import (
    AttentionDropout,
    ChannelDropout1d,
    ChannelDropout2d,
    SequenceDropout,
    VariationalDropout,
)
from equipoise.nn.embedding import AdaptiveEmbedding, AdaptiveSoftmax
from equipoise.nn.frozen import frozen
from equipoise.nn.norm import remove_norm, spectral_norm, weight_norm

__all__ = [
    "AdaptiveEmbedding",
    "AdaptiveSoftmax",
    "AttentionDropout",
    "ChannelDropout1d",
    "ChannelDropout2d",
    "RelativeAttention",
    "SequenceDropout",
    "VariationalDropout",
    "frozen",
    "remove_norm",
    "spectral_norm",
    "weight_norm",
]
