"""The arena's listops with each layer behind a convolution, see `nbs/atlas/96_arena.ipynb`."""

from ._arena import convolved

STUDY = convolved("listops")
