"""Quantize, dequantize, scaled GEMM and statistics: ``reference`` is the specification, the Triton files are its twins.

The rest of the package takes them from ``dispatch``, which chooses.
"""
