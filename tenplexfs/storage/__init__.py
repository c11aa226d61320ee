"""Who holds bytes: the store and other sources of arrays."""
