"""The backend of Triton kernels: the functions of ``kernels/backend.py``, from the modules of this folder."""

from __future__ import annotations

from fp8debug.kernels.gpu.amax_history import next_scale_inv
from fp8debug.kernels.gpu.describe.foreign_codes import describe
from fp8debug.kernels.gpu.describe.value_counts import ValueCounts
from fp8debug.kernels.gpu.describe.value_counts import takes as counts_suffice
from fp8debug.kernels.gpu.describe.what_if import observe
from fp8debug.kernels.gpu.gemm.error import FILLED as RESULT_SLOTS
from fp8debug.kernels.gpu.gemm.error import compare, damage, row_slots
from fp8debug.kernels.gpu.gemm.gemm import fastest, gemm, prepare, prepared
from fp8debug.kernels.gpu.gemm.gemm import supports as takes_scales
from fp8debug.kernels.gpu.gemm.sampled import columns_of, dequantize_lines
from fp8debug.kernels.gpu.launcher import eager
from fp8debug.kernels.gpu.linear_plans import backward_plan_of, fprop_plan_of
from fp8debug.kernels.gpu.low_bit.plan import quantize as quantize_low_bit
from fp8debug.kernels.gpu.low_bit.plan import supports as takes_low_bit
from fp8debug.kernels.gpu.quantize.quantize import largest as finite_amax
from fp8debug.kernels.gpu.quantize.quantize import quantize
from fp8debug.kernels.gpu.quantize.quantize import supports as takes_cast
from fp8debug.kernels.gpu.quantize.tile_plan import plan_of
from fp8debug.kernels.gpu.quantize.tiling import OPERAND, new_outputs
from fp8debug.kernels.gpu.quantize.two_way_plan import two_way_plan_of
from fp8debug.kernels.gpu.scratch import CapturedNumbers, flush, pool_of_graph, to_device
from fp8debug.kernels.gpu.step_end import Joiner, StateSender, send_number

__all__ = [
    "OPERAND",
    "RESULT_SLOTS",
    "backward_plan_of",
    "columns_of",
    "compare",
    "counts_suffice",
    "damage",
    "dequantize_lines",
    "describe",
    "eager",
    "fastest",
    "finite_amax",
    "flush",
    "fprop_plan_of",
    "gemm",
    "new_joiner",
    "new_numbers",
    "new_outputs",
    "new_sender",
    "new_value_counts",
    "next_scale_inv",
    "observe",
    "plan_of",
    "pool_of_graph",
    "prepare",
    "prepared",
    "quantize",
    "quantize_low_bit",
    "row_slots",
    "send_number",
    "takes_cast",
    "takes_low_bit",
    "takes_scales",
    "to_device",
    "two_way_plan_of",
]

new_value_counts = ValueCounts
new_joiner = Joiner
new_numbers = CapturedNumbers
new_sender = StateSender
