"""Quantize, dequantize, scaled GEMM and statistics: ``reference`` is the specification, the Triton files are its twins."""
