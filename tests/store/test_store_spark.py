"""Spark reads the same files by the same SQL; skipped without pyspark (and the Java it needs)."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fp8debug.store.schema import SITE_KEYS, columns_of
from fp8debug.store.views import Dialect, sites_sql
from tests.synthetic import build

pyspark = pytest.importorskip("pyspark", reason="pyspark is not installed")
pytestmark = pytest.mark.slow

SPARK = Dialect(array=lambda items: f"array({', '.join(items)})", element=lambda values, i: f"element_at({values}, {i})")
DOCS = Path(__file__).parents[2] / "docs" / "schema.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spark")


@pytest.fixture(scope="module")
def spark(folder: Path) -> Iterator[Any]:
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java")
    from pyspark.sql import SparkSession

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # where Java starts, for the relative paths of the page
        session = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    yield session
    session.stop()


@pytest.mark.filterwarnings("default")
def test_the_view_sites_is_the_same_in_spark(spark: Any, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = build(folder / "runs" / "exp1", num_steps=11, world_size=3, what_if=("tensorwise_current",))
    page = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    exec(next(block for block in page if "spark" in block), {"spark": spark})
    assert "|blocks.0.attn.qkv|            0|" in capfd.readouterr().out

    spark.table("stats").createOrReplaceTempView("raw")
    spark.sql(sites_sql(columns_of("stats"), SPARK, is_single_rank=False)).createOrReplaceTempView("sites")
    query = f"SELECT * FROM sites ORDER BY {', '.join(SITE_KEYS)}"
    found, wanted = [row.asDict() for row in spark.sql(query).collect()], run.sql(query).to_pylist()
    assert len(found) == len(wanted)
    for ours, theirs in zip(wanted, found, strict=True):
        for name, value in ours.items():
            same = value == theirs[name] or math.isclose(value, theirs[name], rel_tol=1e-9, abs_tol=1e-12)
            assert same, (name, value, theirs[name])
