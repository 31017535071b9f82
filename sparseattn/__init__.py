"""Five papers on sparse attention, derived, implemented, checked and reproduced in notebooks.

The layers drop into a model and need torch, numpy, scipy and jaxtyping only:

    >>> import torch
    >>> from sparseattn import HEPTAttention
    >>> layer = HEPTAttention(32, heads=4, coord_dims=2)
    >>> layer(torch.randn(1, 1000, 32), torch.rand(1, 1000, 2)).shape
    torch.Size([1, 1000, 32])
"""
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

try:
    import jaxtyping  # noqa: F401
except ImportError:  # shapes in annotations are for readers: a machine that has torch only goes without
    _shapes = ModuleType("jaxtyping", "Names of shapes only, by sparseattn: jaxtyping is not installed.")
    _shapes.__spec__ = ModuleSpec("jaxtyping", None)  # without a loader: no file has it
    for _name in ("Bool", "Float", "Int", "Num", "Shaped"):
        setattr(_shapes, _name, type(_name, (), {"__class_getitem__": classmethod(lambda cls, of: of[0])}))
    sys.modules["jaxtyping"] = _shapes

from sparseattn import baselines  # its modules join the registry
from sparseattn.core.attention import check_values
from sparseattn.core.native import native_info
from sparseattn.core.relaxation import same_draws
from sparseattn.core.transformer import Encoder, attention_names
from sparseattn.hept.layer import HEPTAttention
from sparseattn.pat.layers import GroupShuffleAttention
from sparseattn.sampled.attention import SampledAttention
from sparseattn.samsa.attention import SAMSAAttention
from sparseattn.sbm.attention import SBMAttention

__version__ = "0.1.0"
__all__ = [
    "Encoder",
    "GroupShuffleAttention",
    "HEPTAttention",
    "SAMSAAttention",
    "SBMAttention",
    "SampledAttention",
    "attentions",
    "baselines",
    "check_values",
    "native_info",
    "same_draws",
]


def attentions() -> list[str]:
    """Names of every attention mechanism that `Encoder(attention=...)` knows."""
    return attention_names()
