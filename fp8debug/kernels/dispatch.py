"""The kernels that the rest of the package calls."""

from fp8debug.kernels.history import AmaxHistory, finite_amax
from fp8debug.kernels.reference import Operand, dequantize, gemm, measure, operand_pair, quantize, statistics

__all__ = [
    "AmaxHistory",
    "Operand",
    "dequantize",
    "finite_amax",
    "gemm",
    "measure",
    "operand_pair",
    "quantize",
    "statistics",
]
