"""The arena's listops: rows of SBM-Transformer and SAMSA in one network, see `nbs/atlas/96_arena.ipynb`."""

from ._arena import study

STUDY = study("listops")
