"""Fused operations for GPUs: Triton kernels, each beside a plain twin that says what it computes.

Every function takes `backend="auto"`: the kernel for CUDA tensors of a dtype it takes where Triton is installed, else
the twin. Triton is imported when a kernel is first used. What a step costs in bytes, and how the kernels are cut, is in
docs/maths/kernels.md.
"""

from equipoise.ops.anderson import AndersonMemory, anderson_step
from equipoise.ops.attention import attend
from equipoise.ops.broyden import BroydenMemory, broyden_step, low_rank_apply
from equipoise.ops.channels import ChannelsParts, channels_follow
from equipoise.ops.corrected import CorrectedMemory, CorrectedParts, corrected_step
from equipoise.ops.hyper import HyperMemory, HyperParts, hyper_step
from equipoise.ops.last import take_last
from equipoise.ops.likelihood import add_nll, nll
from equipoise.ops.low_rank import LowRankMemory, LowRankParts, low_rank_step
from equipoise.ops.norm import group_norm, residual_norm
from equipoise.ops.picard import picard_follow, picard_settle, picard_step
from equipoise.ops.standing import Standing
from equipoise.ops.start import image_start
from equipoise.ops.taps import drop_taps, gather_taps
from equipoise.ops.trellis import trellis_cell
from equipoise.ops.weight_norm import normalised_rows
from equipoise.ops.words import lookup

__all__ = [
    "AndersonMemory",
    "BroydenMemory",
    "ChannelsParts",
    "CorrectedMemory",
    "CorrectedParts",
    "HyperMemory",
    "HyperParts",
    "LowRankMemory",
    "LowRankParts",
    "Standing",
    "add_nll",
    "anderson_step",
    "attend",
    "broyden_step",
    "channels_follow",
    "corrected_step",
    "drop_taps",
    "gather_taps",
    "group_norm",
    "hyper_step",
    "image_start",
    "lookup",
    "low_rank_apply",
    "low_rank_step",
    "nll",
    "normalised_rows",
    "picard_follow",
    "picard_settle",
    "picard_step",
    "residual_norm",
    "take_last",
    "trellis_cell",
]
