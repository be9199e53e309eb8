"""Damaged, hostile, incomplete and very large checkpoints: one line each, and the rest is judged."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp8debug.checkpoints import CheckReport, check_checkpoint, open_checkpoint
from fp8debug.errors import RunError, UsageError
from tests.checkpoints import writers
from tests.checkpoints.writers import NAMES

BAD = NAMES[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return writers.save_sharded(writers.LAYOUTS["deepseek"](writers.original()), tmp_path / "model")


def kinds(report: CheckReport) -> list[tuple[str, str]]:
    return [(finding.code, str(finding.severity)) for finding in report if finding.severity > "info"]


def raw(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str = "F32", shape: Any = (4,), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_a_truncated_shard(folder: Path) -> None:
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-5000])
    report = check_checkpoint(folder)
    assert {code for code, _ in kinds(report)} <= {"F204", "F201"}
    first = next(f for f in report if f.code == "F204")
    assert first.file == shard.name and "lies beyond the end of the file" in first.message
    assert len(report.judged.weights) >= 2, "the other shard is judged"


def test_a_shard_that_is_cut_within_its_header(folder: Path) -> None:
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:100])
    report = check_checkpoint(folder)
    assert any(f.code == "F204" and f.file == shard.name and f.tensor is None for f in report)


def test_a_missing_shard(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()
    found = next(f for f in check_checkpoint(folder) if f.code == "F205")
    assert (found.file, found.tensor) == ("model-00002-of-00002.safetensors", None)
    assert "is missing: the index places" in found.message


def test_a_missing_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    report = check_checkpoint(folder)
    assert kinds(report) == [("F205", "warning")] and "index.json is missing" in report[0].message
    (folder / "model-00001-of-00002.safetensors").unlink()
    assert ("F205", "error") in kinds(check_checkpoint(folder))


def test_an_index_that_cannot_be_read(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{")
    report = check_checkpoint(folder)
    assert kinds(report) == [("F204", "error")] and report[0].file == "model.safetensors.index.json"
    with pytest.raises(RunError, match=r"index\.json cannot be read"):
        check_checkpoint(folder / "model.safetensors.index.json")


def test_an_index_that_leads_out_of_its_folder(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"]["x"] = "../../etc/secret.safetensors"
    index.write_text(json.dumps(document))
    (found,) = check_checkpoint(folder)
    assert (found.code, found.tensor) == ("F204", "x") and "which is no file beside the index" in found.message


def test_an_index_that_names_a_tensor_too_many(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"]["gone.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(document))
    (found,) = check_checkpoint(folder)
    assert (found.code, found.tensor, str(found.severity)) == ("F205", "gone.weight", "error")


def test_a_tensor_in_two_shards_and_a_stale_shard(folder: Path) -> None:
    writers.save({"model.norm.weight": torch.ones(320)}, folder / "model-00003-of-00002.safetensors")
    report = check_checkpoint(folder)
    assert ("F205", "error") in kinds(report) and ("F205", "warning") in kinds(report)
    assert any(f.tensor == "model.norm.weight" and "lies in" in f.message for f in report)
    assert any(f.file == "model-00003-of-00002.safetensors" and "not in the index" in f.message for f in report)


def test_shards_of_two_saves(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    writers.save({"a": torch.ones(3)}, folder / "model-00001-of-00003.safetensors")
    report = check_checkpoint(folder)
    assert any("of 2 and 3 shards: one of them is stale" in f.message or f.also for f in report if f.code == "F205")


def test_files_of_another_set_beside_an_index_are_none_of_ours(folder: Path) -> None:
    writers.save({"a": torch.ones(3)}, folder / "consolidated.safetensors")
    assert list(check_checkpoint(folder)) == []


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (entry("F99"), "has the type 'F99', which safetensors does not define"),
        (entry(shape=(5,)), "takes 16 bytes, and F32[5] has 20"),
        (entry(shape=(-4,)), "no sizes"),
        (entry(shape=("4",)), "no sizes"),
        (entry(shape=(True,)), "no sizes"),
        (entry(offsets=(0, 16, 17)), "no sizes"),
        (entry(shape=(1 << 40, 1 << 40), offsets=(0, 16)), "takes 16 bytes"),
        (entry(shape=(1 << 20,), offsets=(0, 4 << 20)), "lies beyond the end of the file"),
        ({"dtype": "F32"}, "has no dtype, shape and data_offsets"),
        ([1], "has no dtype, shape and data_offsets"),
        ({"dtype": ["F32"], "shape": [4], "data_offsets": [0, 16]}, "is no safetensors file"),
        (entry(offsets=(8, 24)), "shares bytes with good"),
    ],
)
def test_a_hostile_entry(tmp_path: Path, bad: Any, said: str) -> None:
    file = raw(tmp_path / "model.safetensors", {"good": entry(), "bad": bad}, b"\0" * 40)
    (found,) = check_checkpoint(file)
    assert (found.code, found.tensor) == ("F204", "bad") and said in found.message
    assert "\n" not in found.message


@pytest.mark.parametrize(
    ("header", "length", "said"),
    [
        (b"", None, "is no safetensors file, or cut off"),
        (b"{}", 1 << 62, "is no safetensors file, or cut off"),
        (b"[1]", None, "has a header that is no JSON object"),
        (b"{" * 9, None, "is no safetensors file"),
        (b"[" * 100_000, None, "is nested deeper"),
        (b"\xff\xfe{}", None, "is no safetensors file"),
        (b"{}", None, "has no tensor that can be read"),
    ],
)
def test_a_hostile_header(tmp_path: Path, header: bytes, length: int | None, said: str) -> None:
    with pytest.raises(RunError, match=said) as error:
        check_checkpoint(raw(tmp_path / "model.safetensors", header, length=length))
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


def test_random_damage_is_never_a_traceback(tmp_path: Path) -> None:
    file = writers.save(writers.LAYOUTS["deepseek"](writers.original(64, 64)), tmp_path / "model.safetensors")
    sound, rng = file.read_bytes(), random.Random(0)
    length = int.from_bytes(sound[:8], "little")
    for _ in range(150):
        damaged = bytearray(sound)
        for _ in range(rng.randint(1, 8)):
            damaged[rng.randrange(length + 8)] = rng.randrange(256)
        file.write_bytes(bytes(damaged[: rng.choice([len(damaged), rng.randrange(1, len(damaged))])]))
        try:
            check_checkpoint(file)
        except (RunError, UsageError) as error:
            assert "\n" not in str(error)


def test_names_are_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fp8debug_cli.main import status

    name = "\x1b[2J::error::x\n<script>.weight"
    file = writers.save({name: torch.full((64, 64), float("nan"))}, tmp_path / "model.safetensors")
    for form in ("table", "html", "github", "sarif", "csv"):
        assert status(["check", str(file), "--format", form]) == 1
        out = capsys.readouterr().out
        assert "\x1b" not in out and "<script>" not in (out if form == "html" else "")
        assert form != "github" or all(line.startswith("::") for line in out.splitlines())


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="does not exist; give a safetensors file"):
        check_checkpoint(tmp_path / "none")
    with pytest.raises(RunError, match=r"holds no \.safetensors file"):
        check_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(RunError, match=r"pytorch_model\.bin is a pickle"):
        check_checkpoint(tmp_path)
    with pytest.raises(UsageError, match="expected the path"):
        check_checkpoint("")
    with pytest.raises(UsageError, match="https:// is not read"):
        check_checkpoint("https://example.org/model.safetensors")


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8debug.checkpoints import check

    file = writers.save(writers.LAYOUTS["deepseek"](writers.original()), tmp_path / "model.safetensors")
    opened = open_checkpoint(file)
    file.write_bytes(file.read_bytes()[:50_000])
    monkeypatch.setattr(check, "open_checkpoint", lambda _: opened)
    report = check_checkpoint(file)
    assert kinds(report)[0] == ("F204", "error") and "cannot be read" in report[0].message


def test_ten_thousand_tensors(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    header: dict[str, Any] = {}
    data = bytearray()
    for expert in range(5000):
        name = f"model.layers.0.mlp.experts.{expert}.up_proj.weight"
        codes = rng.integers(0, 0x7F, 64, dtype=np.uint8).tobytes()
        for key, dtype, shape, part in (
            (name, "F8_E4M3", [8, 8], codes),
            (f"{name}_scale_inv", "F32", [1, 1], np.float32(1e-4).tobytes()),
        ):
            header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(part)]}
            data += part
    del header["model.layers.0.mlp.experts.4321.up_proj.weight_scale_inv"]
    (found,) = check_checkpoint(raw(tmp_path / "model.safetensors", header, bytes(data)))
    assert (found.code, found.tensor) == ("F201", "model.layers.0.mlp.experts.4321.up_proj.weight")


def test_a_weight_larger_than_a_chunk_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same facts however small the chunks are, in blocks, in rows and under one scale."""
    from fp8debug.checkpoints import scan

    weights = writers.original()
    reference = writers.save(weights, tmp_path / "original.safetensors")
    for layout in ("deepseek", "per_tensor", "per_channel_bf16", "nvfp4", "experts", "engine_1d"):
        against = reference
        if layout == "experts":
            against = writers.save(writers.experts_original(weights), tmp_path / "experts.safetensors")
        file = writers.save(writers.LAYOUTS[layout](weights), tmp_path / "model.safetensors")
        documents = []
        for chunk in (1 << 20, 4096):
            monkeypatch.setattr(scan, "CHUNK", chunk)
            documents.append(check_checkpoint(file, against).to_dict()["weights"])
        for whole, parts in zip(*documents, strict=True):
            for key, value in whole.items():
                assert parts[key] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value), (layout, key)


def test_memory_does_not_grow_with_the_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tracemalloc

    from fp8debug.checkpoints import scan

    monkeypatch.setattr(scan, "CHUNK", 1 << 16)
    peaks = []
    for rows in (1024, 8192):
        codes, scales = writers.cast(torch.randn(rows, 1024))
        file = writers.save({"a.weight": codes, "a.weight_scale_inv": scales}, tmp_path / "model.safetensors")
        reference = writers.save({"a.weight": torch.randn(rows, 1024).bfloat16()}, tmp_path / "original.safetensors")
        tracemalloc.start()
        check_checkpoint(file, reference, workers=1)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0], peaks


@pytest.mark.parametrize("workers", [1, 4])
def test_progress_ends_at_all_bytes(tmp_path: Path, workers: int) -> None:
    file = writers.save(writers.LAYOUTS["deepseek"](writers.original()), tmp_path / "model.safetensors")
    seen: list[tuple[int, int]] = []
    check_checkpoint(file, progress=lambda done, total, _: seen.append((done, total)), workers=workers)
    assert seen[-1][0] == seen[-1][1] > 0 and [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.parametrize(
    ("name", "begins", "says"),
    [
        (
            "model.pt",
            b"PK\x03\x04",
            "is a zip archive, as torch.save writes it, which is not read: save its tensors with safetensors",
        ),
        ("old.pt", b"\x80\x02", "is a pickle"),
        ("model.gguf", b"GGUF", "is a GGUF file"),
    ],
)
def test_a_file_of_another_kind_is_told_with_the_way_out(tmp_path: Path, name: str, begins: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(begins + bytes(100))
    with pytest.raises(RunError, match=says):
        check_checkpoint(tmp_path / name)


def test_each_fault_of_a_file_has_its_own_cure(tmp_path: Path) -> None:
    tensors = writers.LAYOUTS["deepseek"](writers.original())
    folder = writers.save_sharded(tensors, tmp_path / "shard")
    (folder / "model-00001-of-00002.safetensors").unlink()
    (shard,) = check_checkpoint(folder)
    assert (shard.code, shard.cure) == (
        "F205",
        "copy or download the shard that is missing; if the save never had it, write the index again",
    )
    folder = writers.save_sharded(tensors, tmp_path / "index")
    (folder / "model.safetensors.index.json").unlink()
    (index,) = check_checkpoint(folder)
    assert (index.code, index.cure) == ("F205", "copy or download the index, or write it again from the files")
    file = writers.save(tensors, tmp_path / "type.safetensors")
    file.write_bytes(file.read_bytes().replace(b'"F8_E4M3"', b'"F6_E3M9"', 1))
    assert any(
        f.code == "F204" and f.cure.startswith("save the tensor in a type that safetensors defines")
        for f in check_checkpoint(file)
    )
