"""Is any broken operand or result named? ``python tests/bench/corruptions.py [--first N] [--num N] [--verbose]``

Each seed draws a stack, a layer, a GEMM, an operand or result of it, a first step and one of 31 corruptions, trains a small model
and asks triage. One line for each that is not right, with the SQNR of the site; it asserts nothing. A corruption is

    right       if the first error or warning names the module, the GEMM and the tensor, or that GEMM's result if it is NaN
    harmless    if there is none, and the site keeps 25 dB, below which numerics.md, 4, asks for a finding
    silent      if there is none, and it does not
    elsewhere   if another site is named
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

import fp8debug
from tests.bench.relatives.stack import (
    NOW,
    Cast,
    OwnLinear,
    RowLinear,
    TensorLinear,
    Transformer,
    gen,
    late,
    pow2_down,
    pow2_up,
    spoiled,
    train,
)
from tests.bench.situations import stack

ACT_DB = 25.0
OPERANDS = [("fprop", "input"), ("fprop", "weight"), ("dgrad", "grad_output"), ("dgrad", "weight")]
OPERANDS += [("wgrad", "grad_output"), ("wgrad", "input")]
RESULTS = {"fprop": "output", "dgrad": "grad_input", "wgrad": "grad_weight"}
LINEARS = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.o_proj", "mlp.fc1", "mlp.fc2")


def _of_codes(change: Callable[[Tensor, float], Tensor]) -> Callable[..., Cast]:
    """Return a corruption of an operand that changes its bytes ``[rows, columns]``, of which it gets a copy."""
    return lambda x, data, scales, share: (change(data.view(torch.uint8).clone(), share).view(data.dtype), scales)


def _filled(part: Callable[[Tensor, float], Tensor], value: int) -> Callable[[Tensor, float], Tensor]:
    def change(codes: Tensor, share: float) -> Tensor:
        part(codes, share)[:] = value
        return codes

    return change


def _tail(codes: Tensor, share: float) -> Tensor:
    return codes[-max(1, int(len(codes) * 0.1 * (1 + share))) :]


def _last_columns(codes: Tensor, share: float) -> Tensor:
    return codes[:, -max(1, int(codes.shape[1] * 0.1 * (1 + share))) :]


def _signs(codes: Tensor, share: float) -> Tensor:
    chosen = torch.rand(codes.shape, generator=gen(NOW["step"])) < 0.02 + 0.1 * share
    return torch.where(chosen, codes ^ 0x80, codes)


def _neighbours(codes: Tensor, share: float) -> Tensor:
    moved = (codes & 0x7F).int() + torch.randint(-2, 3, codes.shape, generator=gen(NOW["step"]))
    return (codes & 0x80) | moved.clamp(0, 0x7B).to(torch.uint8)


def _halves(codes: Tensor, share: float) -> Tensor:
    half = len(codes) // 2
    codes[half : 2 * half] = codes[:half]
    return codes


def _one_scale(x: Tensor, data: Tensor, scales: Tensor, share: float) -> Cast:
    scales = scales.clone()
    scales.view(-1)[int(share * (scales.numel() - 1))] *= 4
    return data, scales


def _clipped(x: Tensor, data: Tensor, scales: Tensor, share: float) -> Cast:
    return data.float().clamp(-120, 120).to(data.dtype), scales


#: (tensor before the cast, data, scale_inv, a share in [0, 1]) -> data, scale_inv
OF_OPERANDS: dict[str, Callable[[Tensor, Tensor, Tensor, float], Cast]] = {
    "last rows are zero": _of_codes(_filled(_tail, 0)),
    "last columns are zero": _of_codes(_filled(_last_columns, 0)),
    "a row is one large code": _of_codes(_filled(lambda codes, share: codes[3], 0x7B)),
    "a NaN": _of_codes(_filled(lambda codes, share: codes[:1, 5], 0x7F)),
    "rows are shifted": _of_codes(lambda codes, share: codes.roll(1 + int(5 * share), 0)),
    "columns are shifted": _of_codes(lambda codes, share: codes.roll(1 + int(5 * share), 1)),
    "wrong signs": _of_codes(_signs),
    "codes beside the right ones": _of_codes(_neighbours),
    "the last bit is cut off": _of_codes(lambda codes, share: codes & 0xFE),
    "the second half is the first": _of_codes(_halves),
    "one scale is 4 times too large": _one_scale,
    "scales are too large": lambda x, data, scales, share: (data, scales * (1.3 + share)),
    "scales of the next block": lambda x, data, scales, share: (data, scales.roll(1, 0 if len(scales) > 1 else 1)),
    "inverse scales": lambda x, data, scales, share: (data, 1 / scales),
    "scales rounded up after the cast": lambda x, data, scales, share: (data, pow2_up(scales)),
    "scales rounded down after the cast": lambda x, data, scales, share: (data, pow2_down(scales)),
    "codes are cut off at 120": _clipped,
    "codes of E5M2": lambda x, data, scales, share: (data.float().to(torch.float8_e5m2).to(data.dtype), scales),
}


def _part_of_result(value: Callable[[Tensor], Any]) -> Callable[[Tensor, float], Tensor]:
    def change(out: Tensor, share: float) -> Tensor:
        part = _tail(out, share)
        part[:] = value(part)
        return out

    return change


def _noise(like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=gen(NOW["step"])).to(like.dtype)


def _one_nan(out: Tensor, share: float) -> Tensor:
    out.view(-1)[7] = math.nan
    return out


def _first_columns_negative(out: Tensor, share: float) -> Tensor:
    out[:, :8] *= -1
    return out


#: (a copy of the result, a share in [0, 1]) -> result. They act inside of the library's GEMM, which OwnLinear calls.
OF_RESULTS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "last rows are zero": _part_of_result(lambda part: 0),
    "last rows are noise": _part_of_result(lambda part: _noise(part) * part.float().std().to(part.dtype)),
    "twice the result": lambda out, share: out * 2,
    "a part of the result": lambda out, share: out * (0.6 + 0.2 * share),
    "noise of a tenth": lambda out, share: out * (1 + 0.1 * _noise(out)),
    "a NaN": _one_nan,
    "columns are shifted": lambda out, share: out.roll(1, 1),
    "rows are shifted": lambda out, share: out.roll(1, 0),
    "wrong signs in eight columns": _first_columns_negative,
    "all is zero": lambda out, share: out * 0,
    "a constant is added": lambda out, share: out + out.float().std().to(out.dtype) * 0.3,
    "stored in E4M3": lambda out, share: (out / out.abs().max() * 448).to(stack.E4M3).to(out.dtype) * (out.abs().max() / 448),
    "the first terms of its sums alone": lambda out, share: out,  # of which the GEMM knows
}
_FIRST_TERMS = "the first terms of its sums alone"


def _with_fault(change: Callable[[Tensor, float], Tensor], is_short: bool, first: int, share: float) -> Callable[..., None]:
    """Return the library's GEMM, which has a fault where the layer asks for another path."""

    def gemm(a: Cast, b: Cast, d: Tensor, c: Any = None, recipe: Any = None, **options: Any) -> None:
        if recipe is None or NOW["step"] < first:
            stack.fp8_gemm_nt(a, b, d)
            return
        x, y = stack.values(a), stack.values(b)
        half = x.shape[1] // 2 if is_short else x.shape[1]
        d.copy_(change((x[:, :half] @ y[:, :half].t()).to(d.dtype), share))

    return gemm


def model_of(draw: random.Random) -> tuple[Transformer, Any, str, tuple[str, str], str]:
    """Return a model with a corruption, the library's GEMM, the module, the site (gemm, tensor) and what it is."""
    module, first, share = f"layers.{draw.randrange(2)}.{draw.choice(LINEARS)}", draw.choice([0, 5]), draw.random()
    if draw.random() < 0.65:
        site, name, linear = (
            draw.choice(OPERANDS),
            draw.choice(list(OF_OPERANDS)),
            draw.choice([OwnLinear, RowLinear, TensorLinear]),
        )
        change = OF_OPERANDS[name]
        fault = late(lambda x, data, scales, layer: change(x, data, scales, share), first)
        what = f"{linear.__name__} {module} {' '.join(site)} from step {first}: {name}"
        return spoiled(module, linear=linear, casts={site: fault}), stack.fp8_gemm_nt, module, site, what
    gemm, name = draw.choice(list(RESULTS)), draw.choice(list(OF_RESULTS))
    model = Transformer()
    model.get_submodule(module).path = gemm  # type: ignore[assignment]  # of an OwnLinear
    site, of_result = (gemm, RESULTS[gemm]), OF_RESULTS[name]
    what = f"OwnLinear {module} {' '.join(site)} from step {first}: {name}"
    return model, _with_fault(of_result, name == _FIRST_TERMS, first, share), module, site, what


def judged(seed: int) -> tuple[str, str]:
    """Return the outcome of one seed, and a line for people."""
    NOW.update(step=0, micro=0)
    model, gemm, module, (which, tensor), what = model_of(random.Random(seed))
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stderr(io.StringIO()):
        path = Path(name) / "run"
        with patch.dict(vars(stack.library()), fp8_gemm_nt=gemm):
            train(model, path, steps=14, every=2)
        found = fp8debug.triage(path)
        query = (
            "SELECT min(sqnr_db) AS db FROM sites"
            " WHERE actual AND reference <> 'shadow' AND module = ? AND gemm = ? AND tensor = ?"
        )
        lowest = fp8debug.Run(path).sql(query, [module, which, tensor]).to_pylist()[0]["db"]
    told = [finding for finding in found if finding.severity in ("error", "warning")]
    kept = "not finite" if lowest is None else f"{lowest:.1f} dB"
    named = [f"{f.code} {f.name} {f.module} {f.gemm} {f.tensor}" for f in told[:1]]
    line = f"{what}; {kept}; {named[0] if named else 'no finding'}"
    if not told:
        return "harmless" if lowest is not None and lowest >= ACT_DB else "silent", line
    is_named = (told[0].module, told[0].gemm) == (module, which) and told[0].tensor in (tensor, RESULTS[which])
    is_result = told[0].tensor != tensor
    return "right" if is_named and (not is_result or told[0].code == "F103") else "elsewhere", line


def main() -> None:
    """Print the score."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--num", type=int, default=100, help="number of seeds")
    parser.add_argument("--verbose", action="store_true", help="a line for each that is right, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    outcomes: Counter[str] = Counter()
    for seed in range(options.first, options.first + options.num):
        outcome, line = judged(seed)
        outcomes[outcome] += 1
        if options.verbose or outcome != "right":
            print(f"{seed:4} {outcome:9} {line}", flush=True)
    print(", ".join(f"{num} {name}" for name, num in outcomes.most_common()))


if __name__ == "__main__":
    main()
