"""Dumps as files from anywhere: names that are safe, headers that lie, damaged files, and numbers decoded without torch."""

from __future__ import annotations

import json
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fp8debug.errors import RunError, UsageError
from fp8debug.formats import block_shape
from fp8debug.store import dump_files
from fp8debug.store.dump_files import block_errors, decoded, dumps_at, dumps_of, file_name, find_dumps, open_dump, tile_of

NAMES = [
    "",
    ".",
    "..",
    "../../x",
    "/etc/passwd",
    "a b",
    "a%2Fb",
    "a/b",
    "ünï",
    "x\0y",
    "n\n",
    "A" * 500,
    "A" * 501,
    "é" * 300,
    "\ud800",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_one_safe_file_name(name: str) -> None:
    for call in (0, 12):
        found = file_name(name, "fprop", "input", call)
        assert Path(found).name == found and not found.startswith(".") and found.isascii() and found.isprintable()
        assert len(found) < 255 and found.endswith(".safetensors")


def test_two_names_are_two_files() -> None:
    names = {file_name(name, "fprop", "input", call) for name in NAMES for call in (0, 1)}
    assert len(names) == 2 * len(NAMES)
    assert file_name("blocks.0.up", "fprop", "input", 3) == "blocks.0.up.fprop.input+3.safetensors"


def written(path: Path, **changes: str) -> Path:
    """Write a small dump."""
    x = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    q = x.to(torch.float8_e4m3fn)
    maps = {"block_sum_err2": torch.zeros(1, 1, dtype=torch.float64), "block_sum_x2": torch.ones(1, 1, dtype=torch.float64)}
    metadata = {
        **{"kind": dump_files.KIND, "module": "m", "gemm": "fprop", "tensor": "input", "cast": "e4m3fn tensorwise current"},
        **{"actual": "true", "step": "7", "rank": "0", "call": "0", "shape": "3,4", "tile": "128,128", **changes},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"reference": x, "data": q, "scale_inv": torch.ones(1, 1), **maps}, path, metadata)
    return path


def test_a_dump_is_found_by_its_module(tmp_path: Path) -> None:
    folder = dump_files.rank_folder(tmp_path, 7, 0)
    written(folder / file_name("m", "fprop", "input"))
    written(folder / file_name("m", "fprop", "input", 1), call="1")
    written(folder / file_name("mm", "fprop", "input"), module="mm")
    written(folder / file_name("other", "fprop", "input"))  # says that it is m: its name does not
    (folder / ".half.safetensors").write_bytes(b"")
    (folder / file_name("m", "wgrad", "input")).write_bytes(b"damaged")
    assert [d.call for d in dumps_of(tmp_path, "m")] == [0, 1]
    assert dumps_of(str(tmp_path), "m", step=8) == [] and dumps_of(tmp_path, "x") == []
    assert {step for step, _, _ in find_dumps(tmp_path)} == {7}
    assert len(dumps_at(f"{folder}/mm*")) == 1
    (dump,) = dumps_of(tmp_path, "mm")
    assert dump.values("reference").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert np.isposinf(dump.sqnr_db).all()


@pytest.mark.parametrize(
    "changes",
    [
        *({"shape": "4,4"}, {"shape": "3"}, {"shape": "x,y"}, {"tile": "0,1"}, {"gemm": "x"}, {"step": "-"}, {"kind": "else"}),
        {"tensor": "grad_output"},
    ],
)
def test_metadata_that_lie(tmp_path: Path, changes: dict[str, str]) -> None:
    with pytest.raises(RunError, match=r"is no dump of fp8debug"):
        open_dump(written(tmp_path / "x.safetensors", **changes))


def test_a_tensor_outside_the_file(tmp_path: Path) -> None:
    entry: dict[str, Any] = {"dtype": "F32", "shape": [1 << 30, 1 << 30], "data_offsets": [0, 1 << 62]}
    for change in ({}, {"data_offsets": [-8, 8]}, {"shape": [-1, -1]}, {"dtype": "Q7"}, {"shape": "ab"}, {"data_offsets": 3}):
        header = json.dumps({"__metadata__": {"kind": dump_files.KIND}, "reference": {**entry, **change}}).encode()
        (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
        with pytest.raises(RunError, match=r"is no dump of fp8debug"):
            open_dump(tmp_path / "x.safetensors")


def test_any_damage_is_one_clear_line(tmp_path: Path) -> None:
    whole = written(tmp_path / "x.safetensors").read_bytes()
    noise = random.Random(0)
    for _ in range(300):
        data = bytearray(whole[: noise.randrange(len(whole))] if noise.random() < 0.5 else whole)
        for _ in range(noise.randrange(4)):
            if data:
                data[noise.randrange(len(data))] = noise.randrange(256)
        (tmp_path / "y.safetensors").write_bytes(bytes(data))
        try:
            dump = open_dump(tmp_path / "y.safetensors")
            assert dump.values("reference").shape == (3, 4)
        except (RunError, UsageError) as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(("name", "dtype"), [("F8_E4M3", torch.float8_e4m3fn), ("F8_E5M2", torch.float8_e5m2)])
def test_every_code_of_a_format_is_decoded_as_torch_does(name: str, dtype: torch.dtype) -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes.copy()).view(dtype).float().numpy()
    np.testing.assert_array_equal(decoded(codes, name), expected)


def test_bf16_is_decoded_exactly() -> None:
    codes = np.arange(1 << 16, dtype=np.uint16)
    expected = torch.from_numpy(codes.view(np.int16).copy()).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(decoded(codes.view(np.uint8), "BF16"), expected)
    with pytest.raises(UsageError, match=r"a dump holds no Q7"):
        decoded(codes.view(np.uint8), "Q7")


@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise", "columnwise", "1x128", "128x1", "128x128", "1x32"])
def test_the_maps_are_the_sums_over_their_tiles(granularity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dump_files, "_CHUNK", 200 * 150)  # several chunks of rows
    rows, columns = 300, 200
    noise = np.random.default_rng(0)
    x = noise.standard_normal((rows, columns)).astype(np.float32)
    x[5, 7] = np.nan
    y = torch.from_numpy(x).nan_to_num().to(torch.float8_e4m3fn)
    block = block_shape(granularity, rows, columns)
    scale_inv = noise.uniform(0.9, 1.1, (-(-rows // block[0]), -(-columns // block[1]))).astype(np.float32)
    codes = y.view(torch.uint8).numpy().reshape(-1)
    maps = block_errors((x.reshape(-1).view(np.uint8), "F32"), (codes, "F8_E4M3"), scale_inv, granularity, (rows, columns))
    spread = np.repeat(np.repeat(scale_inv, block[0], 0)[:rows], block[1], 1)[:, :columns]
    error = np.nan_to_num((y.float().numpy() * spread).astype(np.float64) - x)
    height, width = tile_of(granularity)
    for i in range(-(-rows // height)):
        for j in range(-(-columns // width)):
            where = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
            assert maps["block_sum_err2"][i, j] == pytest.approx((error[where] ** 2).sum())
            assert maps["block_sum_x2"][i, j] == pytest.approx((np.nan_to_num(x[where]).astype(np.float64) ** 2).sum())
            assert maps["block_num_nonfinite"][i, j] == np.isnan(x[where]).sum()


def test_reading_needs_neither_torch_nor_safetensors(tmp_path: Path) -> None:
    written(dump_files.rank_folder(tmp_path, 7, 0) / file_name("m", "fprop", "input"))
    code = (
        "import sys; sys.modules['torch'] = sys.modules['safetensors'] = None;"
        "from fp8debug.store.dump_files import dumps_of; print(dumps_of(sys.argv[1], 'm')[0].values('data').sum())"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.stdout == "66.0\n", done.stderr
