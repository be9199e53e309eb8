"""The columns of a run directory: type, unit, merge rule and one sentence each; docs/schema.md is printed from here.

``python -m fp8debug.store.schema > docs/schema.md``
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from fp8debug.metrics import Slot, derived_columns, slots

# What each version changed; a reader keeps reading all older ones.
# 1: first version (fp8debug 0.1).
# 2: slots of choices, single rows, second reads and sums of gradients; inference_* columns of steps.
# 3: shard of stats.
# 4: slots of stochastic rounding and of the spread of scales; what an optimizer gets of a step's backward passes, in updates.
# 5: code of events.
# 6: beta2 and the optimizer's own count of steps, in updates.
# 7: table parameters; num_bf16, in updates.
SCHEMA_VERSION = 7

#: How an event of kind ``recording`` tells that nothing is recorded from its step on, and its code.
RECORDING_STOPPED, STOPPED_CODE = "recording stopped", "recording-stopped"
#: Beginning of a note on an exception that ended the program, and its code.
ENDED_BY, ENDED_CODE = "ended by", "program-ended"
#: Code of a note that another model of the process trains by a loss of its own.
OTHER_LOSS_CODE = "other-loss"

ARROW_TYPES: dict[str, pa.DataType] = {
    "bool": pa.bool_(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "string": pa.string(),
    "timestamp": pa.timestamp("us", "UTC"),
    "list<int64>": pa.list_(pa.int64()),
}


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        name: column name.
        type: a key of ``ARROW_TYPES``.
        unit: ``1``, ``x`` (unit of the tensor), ``x^2``, ``s``, ``log2``, ``dB``; empty for a name or a flag.
        merge: how the rows of several ranks join: ``key`` (rows are joined where it is equal), ``sum``, ``max``,
            ``min``, ``mean``, ``all``, ``any``, ``list``; empty where rows are not joined.
        doc: one sentence.
    """

    name: str
    type: str
    unit: str
    merge: str
    doc: str

    @property
    def field(self) -> pa.Field:
        """The Arrow field, with unit, merge rule and sentence as its metadata."""
        metadata = {"unit": self.unit, "merge": self.merge, "doc": self.doc}
        return pa.field(self.name, ARROW_TYPES[self.type], metadata=metadata)


_STEP = Column("step", "int64", "1", "key", "Optimizer step, counted from 0.")
_RANK = Column("rank", "int32", "1", "list", "Global rank that wrote the row.")
_TIME = Column("time", "timestamp", "s", "min", "When the row was made, UTC.")

_SITE = (
    _STEP,
    _RANK,
    Column("module", "string", "", "key", "Fully qualified name of the module."),
    Column("gemm", "string", "", "key", "The matrix product: fprop, dgrad or wgrad."),
    Column(
        "tensor",
        "string",
        "",
        "key",
        "Operand (input, weight, grad_output) or result (output, grad_input, grad_weight).",
    ),
    Column(
        "cast_name",
        "string",
        "",
        "key",
        "How the operand was quantized, as str(Cast); of a result, 'FIRST @ SECOND' of its operands; bf16 for one not cast.",
    ),
    Column(
        "reference",
        "string",
        "",
        "key",
        "What the actual tensor is compared with: operand (the tensor before its cast), shadow (the BF16 GEMM of the"
        " same operands) or exact (the FP32 GEMM of the dequantized operands).",
    ),
    Column("actual", "bool", "", "key", "True for the cast that ran, false for a what-if."),
    Column(
        "call_index",
        "int32",
        "1",
        "min",
        "Execution order: place of the module's first call in the step's forward, plus 2^20 times the number of the rank's first"
        " pipeline stage.",
    ),
    Column(
        "replicated",
        "bool",
        "",
        "all",
        "Ranks hold copies (a weight under data parallelism): of those with the same shard the lowest counts, not the sum.",
    ),
    Column("shard", "int32", "1", "min", "Which piece of a tensor that is split over ranks the rank holds; null reads as 0."),
    Column("num_tensors", "int64", "1", "sum", "Observations (microbatches) merged into the row."),
)

STEPS: tuple[Column, ...] = (
    _STEP,
    _RANK,
    _TIME,
    Column("loss", "float64", "1", "mean", "Training loss of the step."),
    Column("grad_norm", "float64", "1", "max", "Norm of all gradients before clipping."),
    Column("lr", "float64", "1", "max", "Learning rate."),
    Column("loss_scale", "float64", "1", "min", "Loss scale of mixed precision."),
    Column("inference_kl", "float64", "1", "mean", "KL divergence of inference's logits from training's, nats a token."),
    Column("inference_nmse", "float64", "1", "mean", "Squared difference of both paths' logits over their variance."),
    Column("inference_flip_rate", "float64", "1", "mean", "Share of tokens whose most likely class is another."),
    Column("tokens", "int64", "1", "sum", "Tokens that the rank trained on in the step."),
    Column("seconds", "float64", "s", "max", "Wall time of the step."),
    Column("sampled", "bool", "", "any", "True when the step's statistics were recorded."),
    Column(
        "nonfinite_module",
        "string",
        "",
        "min",
        "Module whose GEMM returned the first NaN or Inf of the step (check_finite); null where none did or none was searched."
        " Over ranks: of the lowest that has one.",
    ),
    Column(
        "nonfinite_origin",
        "string",
        "",
        "min",
        "What held it: gemm (its cast or GEMM made it), outside (its input or grad_output came with it) or weight.",
    ),
    Column("nonfinite_gemm", "string", "", "min", "The GEMM: fprop, dgrad or wgrad; null in runs of older versions is fprop."),
)

UPDATES: tuple[Column, ...] = (
    _STEP,
    _RANK,
    Column("module", "string", "", "key", "Fully qualified name of the module whose weight it is."),
    Column("optimizer", "string", "", "min", "Class of the optimizer."),
    Column("dtype", "string", "", "min", "Dtype of the weight that the optimizer wrote."),
    Column(
        "keeps_precision",
        "bool",
        "",
        "any",
        "The optimizer keeps the weight in FP32 as well, or what rounding took from it (Kahan's sum).",
    ),
    Column("lr", "float64", "1", "max", "Learning rate of the weight's group; null where it is a number on the device."),
    Column("beta1", "float64", "1", "max", "Decay of the first moment, of Adam."),
    Column("beta2", "float64", "1", "max", "Decay of the second moment, of Adam."),
    Column("num_steps", "int64", "1", "max", "Steps that the optimizer has counted for this weight, this one included, of Adam."),
    Column("fan_in", "int64", "1", "max", "Columns of the weight."),
    Column("numel", "int64", "1", "sum", "Elements of the weight; the rank's own shard, before ranks join."),
    Column("num_sampled", "int64", "1", "sum", "Elements that were looked at, evenly spread; all further counts are of them."),
    Column("num_moved", "int64", "1", "sum", "Elements that the step changed."),
    Column("num_grad", "int64", "1", "sum", "Elements whose gradient is not 0."),
    Column("num_intended", "int64", "1", "sum", "Elements whose intended update, by the optimizer's formula in FP32, is not 0."),
    Column("num_lost", "int64", "1", "sum", "Of these, those that the step did not change."),
    Column("num_bf16", "int64", "1", "sum", "Elements that BF16 holds as they are before the step, of a weight in FP32."),
    Column("num_moment", "int64", "1", "sum", "Elements of the optimizer's state that were looked at."),
    Column("num_moment_zero", "int64", "1", "sum", "Second moments that are 0 under a gradient that is not."),
    Column("num_moment_clipped", "int64", "1", "sum", "Elements of the state that are NaN, Inf or their dtype's maximum."),
    Column("sum_weight2", "float64", "x^2", "sum", "Sum of the weight's squares before the step."),
    Column("sum_update2", "float64", "x^2", "sum", "Sum of the update's squares, as it happened."),
    Column("sum_intended2", "float64", "x^2", "sum", "Sum of the intended update's squares."),
    Column("sum_intended_update", "float64", "x^2", "sum", "Sum of intended update times update."),
    Column(
        "sum_spacing_log2",
        "float64",
        "log2",
        "sum",
        "Sum over the intended updates of log2(size over the distance of two values of the dtype at the weight); below -1 an"
        " update is lost.",
    ),
    Column("sum_grad2", "float64", "x^2", "sum", "Sum of the gradient's squares as the optimizer left it."),
    Column("sum_moment2", "float64", "x^2", "sum", "Sum of the first moment's squares, of Adam and SGD."),
    Column("max_update", "float64", "x", "max", "Largest update of an element."),
    Column(
        "sum_before2",
        "float64",
        "x^2",
        "sum",
        "Sum of the squares of weight.grad on a few columns when the step's first backward pass began, just after a step of the"
        " same optimizer.",
    ),
    Column(
        "sum_given2",
        "float64",
        "x^2",
        "sum",
        "Sum of the squares of weight.grad as the optimizer gets it, there; null where other ranks add to it.",
    ),
    Column(
        "sum_passes2",
        "float64",
        "x^2",
        "sum",
        "There, of the FP32 sum of the gradients of all passes, or of all uses in one pass.",
    ),
    Column("sum_given_passes", "float64", "x^2", "sum", "There, of weight.grad times that sum."),
    Column(
        "sum_since2",
        "float64",
        "x^2",
        "sum",
        "There, of the sum since weight.grad was last found empty; null of a single pass, whose parts are uses of the weight.",
    ),
    Column("sum_given_since", "float64", "x^2", "sum", "There, of weight.grad times that sum."),
    Column(
        "sum_last2", "float64", "x^2", "sum", "There, of the last pass's gradient; of the last use's where there is one pass."
    ),
    Column("sum_given_last", "float64", "x^2", "sum", "There, of weight.grad times that gradient."),
    Column(
        "sum_first2", "float64", "x^2", "sum", "There, of the first pass's gradient; of the first use's where there is one pass."
    ),
    Column("sum_given_first", "float64", "x^2", "sum", "There, of weight.grad times that gradient."),
)

#: Columns of ``updates`` that the census of other parameters has as well.
_SHARED = (
    *("optimizer", "dtype", "keeps_precision", "lr", "beta1", "beta2", "num_steps", "numel", "num_sampled", "num_moved"),
    *("num_grad", "num_intended", "num_lost", "num_bf16", "num_moment", "num_moment_zero", "num_moment_clipped", "sum_weight2"),
    *("sum_update2", "sum_intended2", "sum_intended_update", "sum_spacing_log2", "sum_grad2", "sum_moment2", "max_update"),
)

PARAMETERS: tuple[Column, ...] = (
    _STEP,
    _RANK,
    Column("parameter", "string", "", "key", "Fully qualified name of a parameter that is no watched weight, or of a buffer."),
    Column("role", "string", "", "min", "One of norm, bias, embedding, linear, other, buffer; by names of class and parameter."),
    Column("shape", "string", "", "min", "Its shape, whole where ranks hold shards of it."),
    Column("state_dtype", "string", "", "min", "Dtype of the optimizer's first state of its size; null without one."),
    Column("requires_grad", "bool", "", "any", "It requires a gradient; null of a buffer."),
    Column("has_grad", "bool", "", "any", "It has a gradient when its optimizer steps, or, without one, when the first does."),
    *(column for name in _SHARED for column in UPDATES if column.name == name),
    Column("num_writes", "int64", "1", "max", "Of a buffer: writes in place since its row before, while it is one tensor."),
    Column("amax_before", "float32", "x", "max", "Largest magnitude before the optimizer's step; null where it is not finite."),
    Column("nonfinite_before", "string", "", "max", "What is not finite before the step: nan or inf; null where all is finite."),
    Column("amax", "float32", "x", "max", "Largest magnitude after the optimizer's step; null where it is not finite."),
    Column("nonfinite", "string", "", "max", "What is not finite after the step: nan or inf; null where all is finite."),
    Column("grad_amax", "float32", "x", "max", "Largest magnitude of its gradient; null where it is not finite."),
    Column("grad_nonfinite", "string", "", "max", "What is not finite in its gradient: nan or inf; null where all is finite."),
)

EVENTS: tuple[Column, ...] = (
    Column("step", "int64", "1", "", "Optimizer step; null when the event belongs to none."),
    Column("rank", "int32", "1", "", "Global rank that wrote the row."),
    Column("time", "timestamp", "s", "", "When the row was made, UTC."),
    Column(
        "kind",
        "string",
        "",
        "",
        "One of nonfinite, skipped, dump, recipe, recording, resume, note, tokens (of experts), inference (by module, JSON).",
    ),
    Column("module", "string", "", "", "Fully qualified name of the module, if it concerns one."),
    Column("message", "string", "", "", "What happened, one sentence."),
    Column(
        "code",
        "string",
        "",
        "",
        "For programs: not-watched, not-repeated, recording-stopped, program-ended, other-loss, not-observed:GEMMS (that the"
        " module needs), not-observed-in-fp8:GEMMS; else null, and before schema 5.",
    ),
)


def _slot_column(slot: Slot) -> Column:
    kind = slot.kind if slot.size == 1 else f"list<{slot.kind}>"
    return Column(slot.name, kind, slot.unit, slot.merge, slot.doc[:1].upper() + slot.doc[1:] + ".")


def stats_columns() -> tuple[Column, ...]:
    """Return the columns of ``stats``: where, then every slot of every registered metric."""
    return _SITE + tuple(_slot_column(slot) for slot in slots().values())


STATS: tuple[Column, ...] = stats_columns()
TABLES: tuple[str, ...] = ("stats", "steps", "updates", "parameters", "events")

#: The columns that name a site of a step; rows of several ranks with equal keys describe one tensor.
SITE_KEYS: tuple[str, ...] = tuple(c.name for c in _SITE if c.merge == "key")


def columns_of(table: str) -> tuple[Column, ...]:
    """Return the columns of ``stats``, ``steps``, ``updates``, ``parameters`` or ``events``."""
    return {"stats": stats_columns(), "steps": STEPS, "updates": UPDATES, "parameters": PARAMETERS, "events": EVENTS}[table]


def arrow_schema(table: str) -> pa.Schema:
    """Return the Arrow schema of a table, with a sentence, unit and merge rule in each field's metadata."""
    metadata = {"fp8debug.table": table, "fp8debug.schema_version": str(SCHEMA_VERSION)}
    return pa.schema([column.field for column in columns_of(table)], metadata=metadata)


def columns_from(schema: pa.Schema) -> list[Column]:
    """Return the columns that a file describes itself; fields without a type or merge rule of ours are left out."""
    names = {str(arrow): name for name, arrow in ARROW_TYPES.items()}
    found = []
    for field in schema:
        metadata = {key.decode(errors="replace"): value.decode(errors="replace") for key, value in (field.metadata or {}).items()}
        if str(field.type) in names and {"unit", "merge", "doc"} <= metadata.keys():
            unit, merge, doc = metadata["unit"], metadata["merge"], metadata["doc"]
            found.append(Column(field.name, names[str(field.type)], unit, merge, doc))
    return found


_INTRODUCTION = """# The files of a run

Printed by `python -m fp8debug.store.schema` from `fp8debug/store/schema.py`; schema version {version}.

```
runs/exp1/
  manifest.json                          schema version, modules, recipe, environment
  speed.json                             what its GEMMs take on a GPU, from fp8debug speed (docs/speed.md)
  notes.json                             what people noted on steps and modules, from the dashboard (docs/dashboard.md)
  rank=00000/manifest.json               rank, world size, device, versions
  rank=00000/stats/part-00000.parquet    one row per step, rank, site, cast and reference
  rank=00000/steps/part-00000.parquet    one row per step and rank
  rank=00000/updates/part-00000.parquet  one row per sampled step, rank and weight: what the optimizer did to it
  rank=00000/parameters/part-00000.parquet  the same of each other parameter and floating buffer
  rank=00000/events/part-00000.parquet   what happened when
  rank=00000/stats-00001.arrows          rows since the last part, an Arrow IPC stream (also steps-, updates-, ...)
  rank=00000/writer.lock                 who writes the folder, while somebody does (docs/robustness.md)
```

A null is "not recorded" or "no data", never 0. The merge rule says how the rows of several ranks join (the rows of one
rank already hold all its microbatches); `key` columns are equal in rows that join. Rates, dB and cosines are not
stored: they follow from the merged slots by the formulas at the end. Unit `x` is the unit of the tensor. The same
sentences stand in the metadata of the Parquet fields.

A run that was closed has Parquet parts only. A run that goes on, or was killed, has its last rows in `.arrows` files:
`pyarrow.ipc.open_stream` reads them, `fp8debug.Run` reads both. Stream number k becomes part k; where both are there,
the part counts. A job that resumed in the same folder writes parts from a new number (`writings` in the rank's
manifest) and its rows replace the earlier ones from its first step on; `fp8debug.Run` sees to that.
"""

_QUERIES = """## Without fp8debug

The files hold the column `rank` themselves: switch off the inference of Hive partitions from `rank=00000`
(`hive_partitioning = false` in DuckDB, `partitioning=None` in pandas and pyarrow).

DuckDB:

```sql
SELECT step, module, sum(num_underflow) / sum(numel) AS underflow_rate
FROM read_parquet('runs/exp1/rank=*/stats/part-*.parquet', union_by_name = true, hive_partitioning = false)
WHERE gemm = 'fprop' AND tensor = 'input' AND actual
GROUP BY step, module
ORDER BY underflow_rate DESC NULLS LAST
LIMIT 10
```

pandas:

```python
from pathlib import Path

import numpy as np
import pandas as pd

parts = Path("runs/exp1").glob("rank=*/stats/part-*.parquet")
stats = pd.concat(pd.read_parquet(part, partitioning=None) for part in parts)
worst = stats[stats.actual & (stats.reference == "operand")].groupby("module")[["sum_err2", "sum_x2"]].sum()
worst["sqnr_db"] = -10 * np.log10(worst.sum_err2 / worst.sum_x2)
print(worst.sort_values("sqnr_db").head())
```

Spark; before version 4.3 by its row reader, because the vectorized one does not know BYTE_STREAM_SPLIT (SPARK-56894):

```python
spark.conf.set("spark.sql.parquet.enableVectorizedReader", "false")
stats = spark.read.option("mergeSchema", "true").parquet("runs/exp1/rank=*/stats/part-*.parquet")
stats.createOrReplaceTempView("stats")
spark.sql("SELECT module, sum(num_saturated) AS num_saturated FROM stats WHERE actual GROUP BY module").show()
```
"""


def _markdown_table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def to_markdown() -> str:
    """Return docs/schema.md."""
    parts = [_INTRODUCTION.format(version=SCHEMA_VERSION)]
    for table in TABLES:
        rows = [[f"`{c.name}`", c.type, c.unit, c.merge, c.doc] for c in columns_of(table)]
        parts.append(f"## {table}\n\n" + _markdown_table(["column", "type", "unit", "merge", "meaning"], rows) + "\n")
    formulas = [[f"`{name}`", d.unit, f"`{d.expression}`", d.doc] for name, d in derived_columns().items()]
    parts.append("## Derived when read\n")
    parts.append("A division by zero gives null, the logarithm of zero minus infinity.\n")
    parts.append(_markdown_table(["column", "unit", "formula", "meaning"], formulas) + "\n")
    parts.append(_QUERIES)
    return "\n".join(parts)


if __name__ == "__main__":
    print(to_markdown(), end="")
