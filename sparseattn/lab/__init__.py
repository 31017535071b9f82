"""Running, training, measuring and reporting; needs the `notebooks` extra."""

SCALES = ("smoke", "cpu", "gpu", "paper")  #: from small to large; the one place that lists them
