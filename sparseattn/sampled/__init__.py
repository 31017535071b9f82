"""Sampled Transformer: attention along random Hamiltonian cycles of a set (OpenReview F7f4BYnDAIc)."""
from sparseattn.sampled.attention import SampledAttention, cycle_attention, random_keys_attention, window_attention
from sparseattn.sampled.cycles import dense_limit_attention, sample_cycle, shift_attention
from sparseattn.sampled.universal import build_approximator, check_contextual, contextual_map

__all__ = ["SampledAttention", "build_approximator", "check_contextual", "contextual_map", "cycle_attention",
           "dense_limit_attention", "random_keys_attention", "sample_cycle", "shift_attention", "window_attention"]
