"""HEPT, the LSH-based efficient point transformer (arXiv 2402.12535)."""
from sparseattn.hept.attention import hept_attention
from sparseattn.hept.layer import HEPTAttention
from sparseattn.hept.models import load_released
from sparseattn.hept.tradeoff import collision_probability

__all__ = ["HEPTAttention", "collision_probability", "hept_attention", "load_released"]
