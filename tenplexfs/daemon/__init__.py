"""Composes the parts into one process."""
