"""The HTTP edge: what Tenplex's clients speak."""
