"""What a result says of an operand that has no row: the closed form beside products of casts of random tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8debug import dequantize, quantize
from fp8debug.recipes import Cast
from fp8debug.rules.reading.unrecorded_operands import FarResult, far_results

GRADIENT, INPUT, MARGIN, EXACT = "e5m2 tensorwise current", "e4m3fn tensorwise current", 6.0, 30.0
TOKENS, IN, OUT = 512, 48, 32


def energy(x: Tensor) -> float:
    return float(x.double().square().sum())


def judged(g: Tensor, x: Tensor, read: Tensor, *, has_row: bool = False, exact_db: float = 60.0) -> list[FarResult]:
    """Judge a run of one wgrad, as far as :func:`far_results` asks for it: of its input there is fprop's row alone."""
    reference, result = g.double().T @ x.double(), g.double().T @ read.double()
    row = {"step": 3, "module": "up", "gemm": "wgrad", "tensor": "grad_weight", "num_tensors": 1, "call_index": 0, "ranks": [0],
           "cast_name": f"{GRADIENT} @ {INPUT}", "sum_x2": energy(reference), "numel": reference.numel()}  # fmt: skip
    sqnr = 10 * math.log10(energy(reference) / energy(result - reference))
    common = {"step": 3, "module": "up", "num_tensors": 1, "reference": "operand"}
    operands = [
        {**common, "gemm": gemm, "tensor": name, "sum_x2": energy(t), "numel": t.numel()}
        for gemm, name, t in (("wgrad", "grad_output", g), ("fprop", "input", x), *([("wgrad", "input", x)] if has_row else []))
    ]

    if exact_db < EXACT:
        operands.append({**row, "reference": "exact"})
    run: Any = SimpleNamespace(
        sql=lambda query, values: SimpleNamespace(to_pylist=lambda: operands),
        modules=[{"fqn": "up", "in_features": IN, "out_features": OUT}],
    )
    return far_results(run, [{**row, "sqnr_db": sqnr}], MARGIN, EXACT)


def cast(x: Tensor) -> Tensor:
    return dequantize(quantize(x, made := Cast.parse(INPUT)), made).float()


def tensors(kind: str) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(len(kind))
    g, x = torch.randn(TOKENS, OUT, generator=made), torch.randn(TOKENS, IN, generator=made)
    if kind == "cancels":  # as at a minimum: the parts of many tokens add to nearly nothing
        g = g - x @ torch.linalg.lstsq(x, g).solution * 0.999
    elif kind == "adds":
        g = x[:, :OUT] + 0.1 * g
    elif kind == "uneven":  # a tenth of the tokens is ten times as large in both
        g[::10], x[::10] = 10 * g[::10], 10 * x[::10]
    return g, x


@pytest.mark.parametrize("kind", ["independent", "cancels", "adds", "uneven"])
def test_a_cast_is_within_what_it_explains(kind: str) -> None:
    g, x = tensors(kind)
    assert judged(g, x, cast(x)) == []


@pytest.mark.parametrize("kind", ["independent", "adds", "uneven"])
@pytest.mark.parametrize("spoils", [torch.abs, lambda x: x.roll(1, 0), lambda x: x * (torch.arange(IN) % 4 > 0)])
def test_what_is_not_the_tensor_is_beyond(kind: str, spoils: Callable[[Tensor], Tensor]) -> None:
    g, x = tensors(kind)
    found = judged(g, x, spoils(cast(x)))
    assert [(far.operand, far.row["step"]) for far in found] == [("input", 3)]


def test_an_operand_with_a_row_and_a_wrong_gemm_are_left_to_others() -> None:
    g, x = tensors("independent")
    assert judged(g, x, x.abs())
    assert not judged(g, x, x.abs(), has_row=True)
    assert not judged(g, x, x.abs(), exact_db=10.0)
