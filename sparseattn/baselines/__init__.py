"""Efficient transformers that the papers are compared with: linear, Performer, Linformer, Nystrom, Reformer, window."""
from sparseattn.baselines.transformers import (
    LinearAttention,
    LinformerAttention,
    NystromAttention,
    PerformerAttention,
    ReformerAttention,
    WindowAttention,
    linear_attention,
    linformer_attention,
    nystrom_attention,
    performer_attention,
    reformer_attention,
    window_attention,
)

__all__ = [
    "LinearAttention",
    "LinformerAttention",
    "NystromAttention",
    "PerformerAttention",
    "ReformerAttention",
    "WindowAttention",
    "linear_attention",
    "linformer_attention",
    "nystrom_attention",
    "performer_attention",
    "reformer_attention",
    "window_attention",
]
