"""Layers that stay constant during a solve."""

from equipoise.nn.dropout import (
    AttentionDropout,
    ChannelDropout1d,
    ChannelDropout2d,
    SequenceDropout,
    VariationalDropout,
)
from equipoise.nn.norm import spectral_norm, weight_norm

__all__ = [
    "AttentionDropout",
    "ChannelDropout1d",
    "ChannelDropout2d",
    "SequenceDropout",
    "VariationalDropout",
    "spectral_norm",
    "weight_norm",
]
