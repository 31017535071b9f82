"""SAMSA: attention to keys that every head samples, without replacement, by learned scores."""
from sparseattn.samsa.attention import SAMSAAttention, samsa_attention
from sparseattn.samsa.models import SAMSA_SETTINGS, GraphBridge, GraphNetwork, PointNetwork, SequenceNetwork
from sparseattn.samsa.sampling import gumbel_top_k, sample_with_replacement, sample_without_replacement

__all__ = ["SAMSA_SETTINGS", "GraphBridge", "GraphNetwork", "PointNetwork", "SAMSAAttention", "SequenceNetwork",
           "gumbel_top_k", "sample_with_replacement", "sample_without_replacement", "samsa_attention"]
