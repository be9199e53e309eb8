"""The Triton twins of the specification; importable only where Triton is. ``dispatch.twin`` loads them."""
