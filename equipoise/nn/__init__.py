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
from equipoise.nn.norm import spectral_norm, weight_norm

__all__ = [
    "AdaptiveEmbedding",
    "AdaptiveSoftmax",
    "AttentionDropout",
    "ChannelDropout1d",
    "ChannelDropout2d",
    "RelativeAttention",
    "SequenceDropout",
    "VariationalDropout",
    "spectral_norm",
    "weight_norm",
]
