"""Data: generated, from a package, or from a path the user gives; never from the network."""
