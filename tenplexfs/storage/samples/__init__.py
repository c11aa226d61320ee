"""Samples of datasets: where they come from, and how their bytes are read."""
