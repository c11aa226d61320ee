"""The edge that training processes speak to: msgpack frames and descriptors over a Unix socket."""
