"""What holds for all tests."""

from hypothesis import settings

# How long an example takes says how busy the machine is, and no more.
settings.register_profile("tenplexfs", deadline=None)
settings.load_profile("tenplexfs")
