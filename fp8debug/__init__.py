"""A numerics debugger for FP8 training."""
