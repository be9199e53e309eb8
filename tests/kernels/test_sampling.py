"""Wide results are compared on a share of their width: what is counted then, and what a share cannot hide."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8debug
from fp8debug.linear import Fp8Linear
from fp8debug.observer.observer import Observer, Settings
from fp8debug.observer.probe import Probe
from fp8debug.recipes import get_recipe
from fp8debug.types import Gemm, TensorRole

TOKENS, K, N, ROWS = 48, 64, 1100, 16
SHARED = 1100 // 128 * 16 + 1100 % 128


def record(path: Path, steps: int = 2, shadow: Any = "sample", fault: Any = None) -> fp8debug.Run:
    torch.manual_seed(0)
    layer = nn.Linear(K, N, bias=False)
    model = fp8debug.convert(nn.Sequential(layer), "blockwise")
    assert isinstance(layer, Fp8Linear)
    layer.distortion = fault
    generator = torch.Generator().manual_seed(1)
    with fp8debug.watch(model, path, every=1, shadow=shadow, shadow_rows=ROWS) as watch:
        for _ in range(steps):
            x = torch.randn(TOKENS, K, generator=generator).bfloat16().float().requires_grad_()
            model(x).square().mean().backward()
            watch.step()
    return fp8debug.Run(path)


def results(run: fp8debug.Run, columns: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run.sql(
        f"SELECT gemm, reference, {columns} FROM stats WHERE reference <> 'operand' ORDER BY step, gemm, reference"
    ).to_pylist()
    return found


def test_a_wide_result_is_compared_on_a_share_of_its_width(tmp_path: Path) -> None:
    found = {(row["gemm"], row["reference"]): row for row in results(record(tmp_path / "run"), "numel, num_rows, sqnr_db")}
    assert {key: (row["numel"], row["num_rows"]) for key, row in found.items()} == {
        ("fprop", "shadow"): (ROWS * SHARED, ROWS),
        ("fprop", "exact"): (ROWS * SHARED, ROWS),
        ("dgrad", "shadow"): (ROWS * K, ROWS),
        ("dgrad", "exact"): (ROWS * K, ROWS),
        ("wgrad", "shadow"): (SHARED * ROWS, SHARED),
        ("wgrad", "exact"): (SHARED * ROWS, SHARED),
    }
    full = {(row["gemm"], row["reference"]): row for row in results(record(tmp_path / "full", shadow="full"), "numel, sqnr_db")}
    assert full["fprop", "shadow"]["numel"] == TOKENS * N
    for key in (("fprop", "shadow"), ("dgrad", "shadow"), ("wgrad", "shadow")):
        assert found[key]["sqnr_db"] == pytest.approx(full[key]["sqnr_db"], abs=0.5)


def test_damage_is_that_of_whole_rows(tmp_path: Path) -> None:
    def damage(shadow: str) -> float:
        rows = results(record(tmp_path / shadow, 8, shadow), "damage, num_damage_rows")
        fprop = [row for row in rows if row["damage"] is not None]
        assert len(fprop) == 8
        return float(sum(row["damage"] for row in fprop) / sum(row["num_damage_rows"] for row in fprop))

    assert damage("sample") == pytest.approx(damage("full"), rel=0.5)  # a third of the rows


def test_every_block_of_a_weight_is_in_the_share_of_every_step(tmp_path: Path) -> None:
    """A scale that is wrong for one block of 128 rows of the weight shows in the result of each step, wherever it is."""

    def wrong(block: int) -> Any:
        def fault(which: Gemm, role: TensorRole, x: Tensor, cast: Any, ordinary: Any) -> Any:
            operand = ordinary(x, cast)
            if which is Gemm.FPROP and role is TensorRole.WEIGHT:
                operand[0].scale_inv[block] *= 2
            return operand

        return fault

    for block in (0, 5, 8):
        rows = results(record(tmp_path / str(block), 3, fault=wrong(block)), "sqnr_db, num_bad_rows")
        found = [row["sqnr_db"] for row in rows if (row["gemm"], row["reference"]) == ("fprop", "shadow")]
        assert len(found) == 3 and max(found) < 15


def test_neighbouring_modules_gemms_and_steps_have_different_shares() -> None:
    """And in eight steps, not all next to each other, a module has compared the whole width."""
    settings = Settings(shadow_rows=ROWS, plain_recipe=get_recipe("blockwise"))
    observer = Observer(settings, lambda finished: None, lambda module, text, aloud: None)
    probes, x = [Probe(observer, name) for name in ("first", "second")], torch.zeros(TOKENS, 4096)
    seen: dict[tuple[str, Gemm], list[Any]] = {}
    for step in range(64):
        observer.step = step
        observer._samples.clear()
        shares = {}
        for probe in probes:
            for which in Gemm:
                share = probe._part(which, x).share(4096, x.device)
                assert isinstance(share, Tensor) and len(share) == 512
                shares[probe.module, which] = tuple(share.tolist())
                seen.setdefault((probe.module, which), []).append(shares[probe.module, which])
        assert len(set(shares.values())) == 6
    for one in seen.values():
        assert one[0] != one[1] and len(set(one)) == 8


@pytest.mark.parametrize(
    ("rows", "width", "columns"),
    [
        *((256, width, n) for width, n in ((64, 64), (1023, 256), (1024, 64), (4096, 128), (8192, 128), (14336, 128))),
        *((1024, width, n) for width, n in ((1000, 1000), (4096, 256), (65536, 512))),
        *((8, width, n) for width, n in ((4, 4), (4096, 4), (1024, 4))),
        (1, 4096, 1),
    ],
)  # fmt: skip
def test_of_a_wide_input_few_columns_are_kept_until_the_backward_pass(rows: int, width: int, columns: int) -> None:
    observer = Observer(Settings(shadow_rows=rows, plain_recipe=get_recipe("blockwise")), lambda f: None, lambda *a: None)
    probe, x = Probe(observer, "one"), torch.zeros(2, width, dtype=torch.bfloat16)
    part = probe._part(Gemm.WGRAD, x)
    assert (width if part.lines is None else len(set(part.lines.tolist()))) == columns
    kept = probe._columns(x, part)
    assert kept.shape == (2, columns) and kept.untyped_storage().nbytes() == 4 * columns
    lines = probe._part(Gemm.FPROP, torch.zeros(4096, 2)).lines
    assert lines is not None and len(lines) == rows
