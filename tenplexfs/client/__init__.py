"""What runs inside training processes: standard library, numpy, msgpack and ml_dtypes alone.

Nothing here outlives a call but what was loaded, so that a process may fork and thread as it likes.
"""
