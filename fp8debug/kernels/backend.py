"""The backend of kernels on a GPU: what ``dispatch`` and others ask of it, and the check whether it runs here.

``kernels/gpu/backend.py`` implements it in Triton, which is loaded at the first tensor on a GPU, not before. The specification of
every function is ``reference``, which serves all other tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from fp8debug.kernels.reference import Operand
from fp8debug.kernels.sampling import Sample
from fp8debug.kernels.slot_rows import RowLayout, Slots
from fp8debug.metrics import Source
from fp8debug.recipes import Cast
from fp8debug.types import Gemm, Quantized

if TYPE_CHECKING:
    from fp8debug.kernels.gpu.describe.value_counts import ValueCounts
    from fp8debug.kernels.gpu.gemm.gemm import PreparedGemm
    from fp8debug.kernels.gpu.linear_plans import BackwardPlan, FpropPlan
    from fp8debug.kernels.gpu.quantize.fast_plan import FastPlan
    from fp8debug.kernels.gpu.quantize.tile_plan import TilePlan
    from fp8debug.kernels.gpu.quantize.tiling import Statistics
    from fp8debug.kernels.gpu.quantize.two_way_plan import TwoWayPlan
    from fp8debug.kernels.gpu.scratch import CapturedNumbers
    from fp8debug.kernels.gpu.step_end import Joiner, StateSender

#: Rows of ``slot_rows`` that a kernel filled, by their layout.
Rows = Slots
#: A quantized operand with its cast.
QuantizedOperand = tuple[Quantized, Cast]


class Backend(Protocol):
    """Functions on tensors of the GPU that is current; each function's own docstring states shapes and errors."""

    @property
    def OPERAND(self) -> RowLayout:  # noqa: N802  # a constant of the module
        """Layout of the statistics of one cast."""
        ...

    @property
    def RESULT_SLOTS(self) -> frozenset[str]:  # noqa: N802  # a constant of the module
        """Slots that :meth:`compare` and :meth:`damage` fill."""
        ...

    # Casts

    def takes_cast(self, x: Tensor, cast: Cast, scale_inv: Tensor | None = None) -> bool:
        """Return whether the kernels take this tensor and cast."""
        ...

    def quantize(
        self,
        x: Tensor,
        cast: Cast,
        scale_inv: Tensor | None = None,
        *,
        layout: str = "rows",
        statistics: bool = False,
        histogram: bool = False,
    ) -> tuple[Quantized, Statistics | None]:
        """Quantize a tensor, and fill the slots of the cast in the same pass."""
        ...

    def takes_low_bit(self, x: Tensor, cast: Cast, scale_inv: Tensor | None = None) -> bool:
        """Return whether the kernels of casts that no FP8 unit has take this tensor and cast."""
        ...

    def quantize_low_bit(
        self, x: Tensor, cast: Cast, scale_inv: Tensor | None = None, *, statistics: bool = False
    ) -> tuple[Quantized, Slots | None]:
        """Quantize a tensor under a cast that no FP8 unit has, and fill the slots of the cast in the same pass."""
        ...

    def new_outputs(self, x: Tensor, cast: Cast, out: str) -> tuple[Tensor, Tensor]:
        """Return memory for data and scale_inv."""
        ...

    def plan_of(self, x: Tensor, cast: Cast, out: str, statistics: bool) -> TilePlan | FastPlan | None:
        """Return the plan by which tensors like this one are quantized, if there is one by now."""
        ...

    def two_way_plan_of(self, x: Tensor, rows: Cast, columns: Cast, statistics: bool) -> TwoWayPlan | None:
        """Return the plan by which tensors like this one are quantized along rows and columns from one read."""
        ...

    def eager(self, x: Tensor) -> bool:
        """Return whether an op on x may run at once: nothing traces, compiles or transforms the program."""
        ...

    def finite_amax(self, x: Tensor) -> Tensor:
        """Return the largest finite magnitude of a non-empty tensor, FP32 ``[]``."""
        ...

    def next_scale_inv(self, cast: Cast, amax: Tensor, state: Tensor, use: str, num_recent: int) -> Tensor:
        """Return the decode factor of delayed scaling, and write the state of its history."""
        ...

    # Statistics

    def observe(
        self,
        x: Tensor,
        casts: Sequence[Cast],
        scale_invs: Sequence[Tensor | None] | None = None,
        *,
        histogram: bool = False,
    ) -> Statistics:
        """Return the statistics of casts that are not running."""
        ...

    def describe(self, source: Source, cast: Cast, q: Quantized) -> Rows | None:
        """Return the slots of an operand beside foreign codes; None where no kernel takes them."""
        ...

    def counts_suffice(self, x: Tensor, casts: Iterable[Cast]) -> bool:
        """Return whether these casts can be computed from the counts of the tensor's values."""
        ...

    def new_value_counts(self, device: torch.device) -> ValueCounts:
        """Return what counts tensors of a device."""
        ...

    def new_joiner(self, state: Mapping[tuple[str, str], Tensor], columns: Mapping[str, int]) -> Joiner:
        """Return what joins rows of ``slot_rows`` to a table's state."""
        ...

    def new_sender(self, state: Tensor, neutral: Tensor) -> StateSender:
        """Return what sends a table's state to the host and clears it."""
        ...

    def send_number(self, value: Tensor, host: Tensor) -> bool:
        """Send a scalar to the host without a copy; False where that cannot be done."""
        ...

    def flush(self, device: torch.device) -> None:
        """Fill the rows of a device whose sums wait for their second stage."""
        ...

    def new_numbers(self) -> CapturedNumbers:
        """Return what one capture sends numbers to the device by."""
        ...

    def to_device(self, numbers: list[int], device: torch.device) -> Tensor:
        """Return integers on a device without waiting for it; behind them may lie others."""
        ...

    def pool_of_graph(self, device: torch.device) -> AbstractContextManager[None]:
        """Have what is captured on the device's current stream take rows of memory that belongs to the graph."""
        ...

    # GEMMs

    def takes_scales(self, a: Cast | str, b: Cast | str) -> bool:
        """Return whether the own kernel multiplies operands of these casts."""
        ...

    def prepared(self, which: Gemm, first: QuantizedOperand, second: QuantizedOperand, dtype: torch.dtype) -> PreparedGemm | None:
        """Return the GEMM that was prepared for operands like these."""
        ...

    def prepare(self, which: Gemm, first: QuantizedOperand, second: QuantizedOperand, dtype: torch.dtype, backend: str) -> None:
        """Keep the way in which operands like these are multiplied."""
        ...

    def fprop_plan_of(
        self, recipe: str, casts: tuple[Cast, Cast], x: Quantized, weight: Tensor, dtype: torch.dtype
    ) -> FpropPlan | None:
        """Return how fprop of a compiled Fp8Linear runs, from a quantized input."""
        ...

    def backward_plan_of(
        self,
        recipe: str,
        casts: tuple[tuple[Cast, Cast], tuple[Cast, Cast]],
        grad_output: Tensor,
        weight: Tensor,
        x: Quantized,
        dtype: torch.dtype,
    ) -> BackwardPlan | None:
        """Return how its dgrad and wgrad run."""
        ...

    def fastest(
        self, which: Gemm, first: QuantizedOperand, second: QuantizedOperand, dtype: torch.dtype, fast_accum: bool = False
    ) -> str:
        """Return the name of the faster GEMM."""
        ...

    def gemm(
        self,
        which: Gemm,
        first: QuantizedOperand,
        second: QuantizedOperand,
        *,
        dtype: torch.dtype = torch.bfloat16,
        fast_accum: bool = False,
        out: Tensor | None = None,
        backend: str = "triton",
    ) -> Tensor:
        """Return one GEMM of a Linear from FP8 operands."""
        ...

    def compare(
        self,
        which: Gemm,
        high: tuple[Tensor, Tensor],
        operands: tuple[Operand, Operand],
        actual: Tensor | None,
        sample: Sample,
        *,
        bias: Tensor | None = None,
        keep: bool = False,
        tell: bool = False,
    ) -> tuple[list[Rows], Tensor | None, tuple[Tensor, Tensor] | None] | None:
        """Describe a result against the shadow and the exact GEMM; None where no kernel takes the operands."""
        ...

    def row_slots(self, x: Tensor, data: Tensor, scale_inv: Tensor, block: tuple[int, int], index: Tensor) -> Rows:
        """Return the slots of sampled rows of a weight."""
        ...

    def damage(self, error: Tensor, grad: Tensor, index: Tensor | None = None) -> Rows:
        """Return the slots of fprop's output that its gradient fills."""
        ...

    def columns_of(self, x: Tensor, index: Tensor, size: int = 1) -> Tensor:
        """Return sampled columns of a tensor."""
        ...

    def dequantize_lines(self, data: Tensor, scale_inv: Tensor, block: tuple[int, int], dim: int, index: Tensor) -> Tensor:
        """Return sampled rows or columns of a quantized tensor, FP32."""
        ...


@cache
def gpu() -> Backend:
    """Return the backend of tensors on a GPU, where :func:`why_no_kernels` returns None."""
    from fp8debug.kernels.gpu import backend

    return backend


@cache
def why_no_kernels() -> str | None:
    """Return why no kernel of ours runs; None where they do."""
    if torch.version.hip:
        return "the kernels are written for GPUs of NVIDIA"
    try:
        triton = import_module("triton")
    except ImportError as error:
        return f"Triton cannot be imported ({error})"
    if find_spec("triton.tools.tensor_descriptor") is None:
        return f"the kernels need Triton 3.4, which comes with torch 2.8; Triton {triton.__version__} is installed"
    return None
