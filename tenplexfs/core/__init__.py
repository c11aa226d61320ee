"""Geometry and decisions: regions, layouts, the PTC, plans. Pure: no I/O, no clock, no randomness."""
