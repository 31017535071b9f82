"""Running, training, measuring and reporting; needs the `notebooks` extra."""
