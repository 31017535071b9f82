"""Point attention transformers: group shuffle attention, Gumbel subset sampling (arXiv 1904.03375)."""
from sparseattn.pat.layers import (
    GroupShuffleAttention,
    GumbelSubsetSampling,
    channel_shuffle,
    group_attention,
    gumbel_subset_sampling,
)
from sparseattn.pat.models import PATClassifier, PATSegmenter

__all__ = ["GroupShuffleAttention", "GumbelSubsetSampling", "PATClassifier", "PATSegmenter", "channel_shuffle",
           "group_attention", "gumbel_subset_sampling"]
