"""Five papers on sparse attention, derived, implemented, checked and reproduced in notebooks."""
__version__ = "0.1.0"
