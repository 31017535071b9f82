"""What all mechanisms share: dense attention, patterns, kernels, the encoder."""
