"""Denoising first on the arena's listops, see `nbs/atlas/97_denoised.ipynb`."""

from ._denoised import study

STUDY = study("listops")
