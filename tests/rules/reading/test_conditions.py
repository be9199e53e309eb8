"""What follows from a condition for single ranks: one rank at least, and every rank, of any joined row that meets it."""

from __future__ import annotations

import random

import duckdb
import pyarrow as pa
import pytest

from fp8debug.metrics import derived_columns
from fp8debug.metrics.expression import to_sql
from fp8debug.rules.reading.conditions import KEYS, RUNNING, Condition, Conditions, Keys, look

CONDITIONS = [
    Condition("underflow_nonzero_rate", ">", 0.05),
    Condition("overflow_rate", ">", 0.0),
    Condition("sqnr_db", "<", 20.0),
    Condition("sqnr_db", ">=", 20.0),
    Condition("gain", ">", 0.2, center=1),
    Condition("headroom", ">", 1.5),
    Condition("headroom", "<", 0.5),
    Condition("num_saturated", ">=", 3),
    Condition("amin", ">=", 0.25),
    Condition("amax", "<", 4.0),
]
SUMS = ("numel", "num_zero", "num_nan", "num_inf", "num_saturated", "num_underflow", "sum_err2", "sum_x2", "sum_xy")


def of_a_rank(noise: random.Random) -> dict[str, float | None]:
    numel, x2 = noise.randint(1, 40), noise.choice([0.0, noise.random(), 5.0])
    counts = {name: noise.choice([0, noise.randint(0, numel // 3)]) for name in ("num_zero", "num_saturated", "num_underflow")}
    row: dict[str, float | None] = {"numel": numel, "num_nan": noise.choice([0, None]), "num_inf": 0, **counts}
    row |= {"sum_x2": x2, "sum_err2": x2 * 10 ** noise.uniform(-3, 0), "sum_xy": x2 * noise.uniform(0.5, 1.5)}
    row |= {"headroom": noise.choice([None, noise.uniform(0, 2)]), "amin": noise.choice([None, noise.random()])}
    return row | {"amax": noise.choice([None, noise.uniform(0, 8)])}


@pytest.mark.parametrize("condition", CONDITIONS, ids=str)
def test_what_follows_for_ranks_holds_for_every_joined_row(condition: Condition) -> None:
    noise = random.Random(0)
    ranks = [{"site": place // 3, **of_a_rank(noise)} for place in range(3000)]
    with duckdb.connect() as db:
        db.register("raw", pa.Table.from_pylist(ranks))
        joins = [f"sum({name}) AS {name}" for name in SUMS]
        joins += ["max(headroom) AS headroom", "max(amax) AS amax", "min(amin) AS amin"]
        db.execute(f"CREATE TABLE joined AS SELECT site, {', '.join(joins)} FROM raw GROUP BY site")
        derived = derived_columns().get(condition.column)
        column = f", {to_sql(derived.expression)} AS {condition.column}" if derived else ""
        bad = {
            site for (site,) in db.execute(f"SELECT site FROM (SELECT *{column} FROM joined) WHERE {condition.rows}").fetchall()
        }
        assert 0 < len(bad) < 1000
        for predicate in filter(None, (condition.some_rank, condition.gate)):
            assert bad <= {site for (site,) in db.execute(f"SELECT site FROM raw WHERE {predicate}").fetchall()}
        if condition.every_rank:
            assert not bad & {
                site for (site,) in db.execute(f"SELECT site FROM raw WHERE NOT ({condition.every_rank})").fetchall()
            }
        assert condition.some_rank or condition.every_rank


def test_one_condition_of_a_rank_is_looked_for_and_all_on_keys() -> None:
    conditions: Conditions = [
        Condition("overflow_rate", ">", 0.25),
        Condition("headroom", ">", 2),
        Keys("gemm = 'a' OR gemm = 'b'"),
        "cosine < 1",
    ]
    found = look(conditions, ["cosine"])
    assert found.rows == (
        f"{RUNNING} AND (overflow_rate > 0.25) AND (headroom > 2) AND (gemm = 'a' OR gemm = 'b') AND (cosine < 1)"
    )
    assert found.hint.startswith("num_saturated > ") and "headroom" not in found.hint
    assert found.hint.endswith(" AND (gemm = 'a' OR gemm = 'b')")
    assert found.keys == KEYS and found.gates == ("num_saturated > 0",) and found.columns == ("cosine",)


def test_a_column_that_is_no_fraction_of_sums_is_refused() -> None:
    with pytest.raises(ValueError, match="cosine is no fraction of sums: its condition is written as text"):
        look([Condition("cosine", "<", 0.9)], [])
