"""Denoising first on the arena's image, see `nbs/atlas/97_denoised.ipynb`."""

from ._denoised import study

STUDY = study("image")
