"""SBM-Transformer: attention masks drawn from stochastic block models (arXiv 2210.15541)."""
from sparseattn.sbm.attention import SBMAttention, sbm_attention
from sparseattn.sbm.sampling import bernoulli, fastrg

__all__ = ["SBMAttention", "bernoulli", "fastrg", "sbm_attention"]
