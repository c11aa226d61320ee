"""Bytes to values and back: .npy, safetensors, manifests, layouts. No I/O."""
