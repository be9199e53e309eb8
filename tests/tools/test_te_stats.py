"""Transformer Engine's statistics logs become a run: written by the library's own logger, judged by the rules that can."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from fp8debug import Run, triage
from fp8debug.errors import RecordError, RunError, UnknownNameError, UsageError
from fp8debug.tools.te_stats import FOLDER, NOMINAL, find_logs, import_te_stats
from fp8debug_cli.main import status

LAYERS = ("blocks.0.fc1", "blocks.0.fc2", "blocks.1.fc1", "blocks.1.fc2")
Stats = Callable[[str, int], Mapping[str, float]]


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """Close the files that the library's logger holds open."""
    yield
    logger = logging.getLogger("Default Statistics")
    for handler in list(logger.handlers):
        handler.close()
        logger.removeHandler(handler)


def written(folder: Path, stats: Stats, steps: range = range(0, 200, 10)) -> Path:
    """Write a log by nvdlfw_inspect."""
    module = pytest.importorskip("nvdlfw_inspect.logging")
    log = module.FileLogger("nvdlfw_inspect", str(folder))
    log._initialize_stats_logger(FOLDER)
    for step in steps:
        for layer in LAYERS:
            for name, value in stats(layer, step).items():
                log.log_scalar(f"{layer}_{name}", value, step)
    return folder


def healthy(layer: str, step: int) -> dict[str, float]:
    return {"gradient_underflows%": 0.02, "activation_underflows%": 0.01, "activation_amax": 4.0, "weight_amax": 0.1}


def sick(layer: str, step: int) -> dict[str, float]:
    is_sick = layer == "blocks.1.fc2" and step >= 100
    return {**healthy(layer, step), **({"gradient_underflows%": 97.0} if is_sick else {})}


def test_an_underflowing_gradient_is_named(tmp_path: Path) -> None:
    logs = written(tmp_path / "te", sick)
    done = import_te_stats(logs, tmp_path / "run")
    assert (done.num_modules, done.num_steps, done.num_ranks, done.recipe, done.is_assumed) == (
        4,
        20,
        1,
        "tensorwise_delayed",
        True,
    )
    findings = triage(Run(tmp_path / "run"))
    (finding,) = findings
    assert (finding.code, finding.module, finding.gemm, finding.tensor) == ("F128", "blocks.1.fc2", "dgrad", "grad_output")
    assert finding.steps == (100, 190) and finding.value == pytest.approx(0.97)
    assert "its SQNR was not recorded" in finding.message
    reasons = dict(findings.skipped)
    assert reasons["F102"] == "not recorded: headroom, sum_err2", "a rule that needs more says what it lacks"


def test_a_healthy_log_gives_no_finding(tmp_path: Path) -> None:
    import_te_stats(written(tmp_path / "te", healthy), tmp_path / "run")
    assert list(triage(Run(tmp_path / "run"))) == []


def test_shares_and_sizes_are_those_of_the_log(tmp_path: Path) -> None:
    def stats(layer: str, step: int) -> dict[str, float]:
        return {
            **{"activation_underflows%": 1.2345, "activation_overflows%": 0.5, "activation_amax": 8.0, "activation_mse": 0.01},
            **{
                "activation_mean": 0.5,
                "activation_std": 2.0,
                "activation_scale_inv_min": 0.125,
                "activation_scale_inv_max": 0.125,
            },
            **{"weight_amax": 0.00001, "activation_dynamic_range": 3.0, "output_amax": 3.0, "output_mse": 1.0},
        }

    done = import_te_stats(written(tmp_path / "te", stats, range(1)), tmp_path / "run")
    assert done.unused == ("output mse",)
    columns = "underflow_rate, overflow_rate, amax, amin, sqnr_db, headroom, cosine"
    row = (
        Run(tmp_path / "run")
        .sql(f"SELECT {columns} FROM sites WHERE tensor = 'input' AND module = 'blocks.0.fc1'")
        .to_pylist()[0]
    )
    assert row["underflow_rate"] == pytest.approx(0.012345) and row["overflow_rate"] == pytest.approx(0.005)
    assert (row["amax"], row["amin"]) == (8.0, 1.0)
    assert row["sqnr_db"] == pytest.approx(26.28, abs=0.01)
    assert row["headroom"] == pytest.approx(8 / 0.125 / 448)
    assert row["cosine"] is None, "what the log does not hold is not recorded"
    weight = Run(tmp_path / "run").sql("SELECT amax FROM sites WHERE tensor = 'weight' LIMIT 1").to_pylist()[0]
    assert weight["amax"] is None, "0.0000 says that it was below the four decimals"


@pytest.mark.parametrize(("growth", "expected"), [(1.5, []), (6.5, [("F128", "blocks.1.fc2", "weight")])])
def test_a_weight_that_outgrows_its_scale_is_named(tmp_path: Path, growth: float, expected: list[tuple[str, str, str]]) -> None:
    def stats(layer: str, step: int) -> dict[str, float]:
        grown = 1 + (growth - 1) * min(1.0, step / 100) if layer == "blocks.1.fc2" else 1.0
        return {
            **healthy(layer, step),
            "weight_amax": 0.2 * grown,
            "weight_scale_inv_min": 0.2 / 448,
            "weight_scale_inv_max": 0.2 / 448,
        }

    import_te_stats(written(tmp_path / "te", stats), tmp_path / "run")
    findings = triage(Run(tmp_path / "run"))
    assert [(f.code, f.module, f.tensor) for f in findings] == expected


def test_stale_scales_are_judged_where_the_log_has_them(tmp_path: Path) -> None:
    """Transformer Engine's own default history: an old spike holds the scale up."""

    def stats(layer: str, step: int) -> dict[str, float]:
        scale = 60.0 if layer == "blocks.0.fc2" and step >= 50 else 0.01
        name = "activation_fp8_delayed_scaling_"
        return {
            **{f"{name}underflows%": 97.0 if scale > 1 else 0.01, f"{name}mse": 0.9 if scale > 1 else 0.0008},
            **{f"{name}scale_inv_min": scale, f"{name}scale_inv_max": scale, "activation_cur_amax": 4.0},
            **{"activation_mean": 0.0, "activation_std": 1.0},
        }

    done = import_te_stats(written(tmp_path / "te", stats), tmp_path / "run")
    assert (done.recipe, done.is_assumed) == ("tensorwise_delayed", False)
    (finding,) = triage(Run(tmp_path / "run"))
    assert (finding.code, finding.module, finding.gemm) == ("F102", "blocks.0.fc2", "fprop")
    assert "97 % of the nonzero" in finding.message and "the scale is made for an amax 6720 times today's" in finding.message


def test_other_recipes_are_what_ifs_and_columnwise_copies_are_other_gemms(tmp_path: Path) -> None:
    def stats(layer: str, step: int) -> dict[str, float]:
        return {
            **{"gradient_fp8_block_scaling_underflows%": 1.0, "gradient_mxfp8_underflows%": 0.5},
            **{"gradient_fp8_block_scaling_underflows%_columnwise": 2.0, "gradient_amax": 2.0},
        }

    logs = written(tmp_path / "te", stats, range(2))
    done = import_te_stats(logs, tmp_path / "run", recipe="blockwise_pow2")
    assert not done.is_assumed
    query = "SELECT gemm, actual, underflow_rate AS rate, cast_name, amax FROM sites WHERE module = 'blocks.0.fc1' AND step = 0"
    rows = {(row["gemm"], row["actual"]): row for row in Run(tmp_path / "run").sql(query).to_pylist()}
    assert set(rows) == {("dgrad", True), ("dgrad", False), ("wgrad", True)}
    assert rows["dgrad", True]["rate"] == 0.01 and "1x128" in rows["dgrad", True]["cast_name"]
    assert rows["dgrad", False]["rate"] == 0.005 and "1x32" in rows["dgrad", False]["cast_name"]
    assert rows["wgrad", True]["rate"] == 0.02 and rows["dgrad", True]["amax"] == 2.0


def test_a_layer_without_statistics_of_a_cast_is_not_called_fp8(tmp_path: Path) -> None:
    def stats(layer: str, step: int) -> dict[str, float]:
        return {"activation_amax": 1.0, **({"activation_underflows%": 0.1} if layer.endswith("fc1") else {})}

    import_te_stats(written(tmp_path / "te", stats), tmp_path / "run")
    run = Run(tmp_path / "run")
    assert [module["fp8"] for module in run.manifest["modules"]] == [True, False, True, False]
    assert {r["cast_name"] for r in run.sql("SELECT cast_name FROM sites WHERE module = 'blocks.0.fc2'").to_pylist()} == {"bf16"}


def test_ranks_have_logs_of_their_own(tmp_path: Path) -> None:
    logs = written(tmp_path / "te", sick) / FOLDER
    first = next(logs.iterdir())
    (logs / first.name.replace("rank-0", "rank-3")).write_text(first.read_text())
    done = import_te_stats(tmp_path / "te", tmp_path / "run")
    run = Run(tmp_path / "run")
    assert done.num_ranks == 2 and run.ranks == [0, 3]
    assert [f.module for f in triage(run)] == ["blocks.1.fc2"]
    assert run.sql("SELECT max(numel) AS n FROM sites WHERE tensor = 'grad_output'").to_pylist() == [{"n": 2 * NOMINAL}]


def test_triage_of_the_log_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = written(tmp_path / "te", sick)
    assert status(["triage", str(logs), "--format", "json"]) == 1
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert (document["run"], document["findings"][0]["module"]) == ("te", "blocks.1.fc2")
    assert "holds Transformer Engine's statistics logs: 4 modules, 20 steps; the recipe is assumed" in said.err
    assert sorted(path.name for path in logs.iterdir()) == [FOLDER], "nothing is written beside the log"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = written(tmp_path / "te", sick)
    out = tmp_path / "run"
    assert status(["import", "te-stats", str(logs), "-o", str(out)]) == 0
    err = capsys.readouterr().err
    assert err.splitlines() == [
        "warning: the log does not name the recipe: tensorwise_delayed is assumed; --recipe names another",
        f"Wrote {out}: 4 modules, 20 steps, 1 rank; fp8debug triage {out} judges it",
    ]
    assert status(["triage", str(out)]) == 1 and "blocks.1.fc2" in capsys.readouterr().out
    assert status(["import", "te-stats", str(logs), "-o", str(out)]) == 2, "the folder holds a run"
    assert status(["import", "te-stats", str(logs), "-o", str(tmp_path / "b"), "--recipe", "nonsense"]) == 2
    assert status(["import", "te-stats", str(tmp_path / "none"), "-o", str(tmp_path / "c")]) == 3
    assert "Traceback" not in capsys.readouterr().err


def test_what_is_no_log(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no statistics log"):
        import_te_stats(tmp_path, tmp_path / "run")
    (tmp_path / "a_globalrank-0.log").write_bytes(
        b"\xff\x00 junk\nblocks.0.fc1_activation_amax iteration=x value=y\n" + b"x" * 100_000
    )
    with pytest.raises(RunError, match="has no statistic of an activation"):
        import_te_stats(tmp_path, tmp_path / "run")
    (tmp_path / "b_globalrank-0.log").write_text("fc_activation_amax \t iteration=000001 \t value=1.0\n")
    with pytest.raises(UsageError, match="several logs of rank 0"):
        import_te_stats(tmp_path, tmp_path / "run")
    with pytest.raises(UnknownNameError):
        import_te_stats(tmp_path / "b_globalrank-0.log", tmp_path / "run", recipe="nonsense")
    import_te_stats(tmp_path / "b_globalrank-0.log", tmp_path / "run")
    with pytest.raises(RecordError, match="already holds a run"):
        import_te_stats(tmp_path / "b_globalrank-0.log", tmp_path / "run")


def test_other_lines_of_a_job_are_passed_over(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    lines = ["step 1 loss 2.0", "NVDLFW - 12:00 - INFO - fc_weight_amax \t iteration=000001 \t value=nan"]
    log.write_text("\n".join([*lines, "fc_weight_amax iteration=2 value=2.5", ""]))
    assert find_logs(log) == [log]
    import_te_stats(log, tmp_path / "run")
    rows: list[dict[str, Any]] = Run(tmp_path / "run").sql("SELECT step, amax FROM sites ORDER BY step").to_pylist()
    assert rows[-1] == {"step": 2, "amax": 2.5}


def test_damaged_lines_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "job.log"
    lines = [
        "fc_weight_amax iteration=1 value=2.0",
        "fc_weight_amax iteration=xx value=2.0",
        "fc_weight_amax iteration=2 value=2,0",
    ]
    log.write_bytes("\n".join([*lines, "step 2 loss 2.0", "fc_weight_amax \t iteration=3", ""]).encode() + b"\xff\xfe iteration=")
    assert import_te_stats(log, tmp_path / "run").num_damaged == 4
    assert status(["import", "te-stats", str(log), "-o", str(tmp_path / "other")]) == 0
    assert "4 lines cannot be read: cut off, or without a number" in capsys.readouterr().err


NAN, INF = float("nan"), float("inf")
#: Statistics of a healthy tensor of 4 at most, as LogFp8TensorStats and LogTensorStats log them.
TENSOR = {
    **{"underflows%": 0.02, "scale_inv_min": 4 / 448, "scale_inv_max": 4 / 448, "mse": 0.0007, "cur_amax": 4.0, "min": -4.0},
    **{"max": 3.9, "mean": 0.0, "std": 1.0, "l2_norm": 32.0, "dynamic_range": 14.0},
}


def judged(tmp_path: Path, stats: Mapping[str, float], fault: Mapping[str, float], steps: range = range(0, 200, 10)) -> Any:
    """Return what triage says of a log in which one layer has other statistics in its second half."""

    def logged(layer: str, step: int) -> dict[str, float]:
        is_bad = layer == "blocks.1.fc2" and step >= steps[len(steps) // 2]
        return {**stats, **(fault if is_bad else {})}

    import_te_stats(written(tmp_path / "te", logged, steps), tmp_path / "run")
    return triage(Run(tmp_path / "run"))


@pytest.mark.parametrize(
    ("stats", "fault", "code", "name", "says"),
    [
        (("underflows%", "mse"), {"underflows%": 97.0, "mse": 0.9}, "F128", "operand-differs", "97 % of the"),
        (("overflows%",), {"overflows%": 30.0}, "F101", "stale-scale-saturation", "by how much was not recorded"),
        (("scale_inv_min", "scale_inv_max", "cur_amax"), {"cur_amax": 400.0}, "F128", "operand-differs", "its amax is 100 times"),
        (("scale_inv_min", "scale_inv_max", "min", "max"), {"min": -400.0}, "F128", "operand-differs", "its amax is 100 times"),
        (
            ("scale_inv_min", "scale_inv_max", "cur_amax"),
            {"scale_inv_min": 2e7, "scale_inv_max": 2e7},
            *("F128", "operand-differs", "become zero: its scale is made for an amax"),
        ),
        (tuple(TENSOR), {"scale_inv_min": NAN, "scale_inv_max": NAN}, "F103", "nonfinite-scale", "the scale is NaN or Inf"),
        (tuple(TENSOR), {"mse": INF}, "F103", "zero-tile-nan", "which was not recorded"),
        *(
            ((stat,), {stat: value}, "F103", "nonfinite-from-outside", "no cast made it")
            for stat, value in (("min", -INF), ("max", NAN), ("cur_amax", INF), ("mean", NAN), ("std", NAN), ("l2_norm", INF))
        ),
        (tuple(TENSOR), {"mean": NAN}, "F103", "nonfinite-from-outside", "no cast made it"),
        (
            tuple(TENSOR),
            {"underflows%": 60.0, "mse": 0.5, "scale_inv_min": 60.0, "scale_inv_max": 60.0},
            *("F102", "stale-history-underflow", "60 % of the nonzero"),
        ),
        (tuple(TENSOR), {"underflows%": 40.0, "cur_amax": 4e3, "std": 4.0}, "F105", "outlier-underflow", "an outlier"),
    ],
)
def test_each_statistic_of_a_log_is_concluded_from(
    tmp_path: Path, stats: tuple[str, ...], fault: dict[str, float], code: str, name: str, says: str
) -> None:
    healthy = {f"activation_{stat}": TENSOR.get(stat, 0.0) for stat in stats}
    findings = judged(tmp_path, healthy, {f"activation_{stat}": value for stat, value in fault.items()})
    assert [(f.code, f.name, f.module, f.tensor) for f in findings] == [(code, name, "blocks.1.fc2", "input")]
    assert says in findings[0].message


@pytest.mark.parametrize("tensor", ["activation", "weight", "gradient", "output", "dgrad", "wgrad"])
def test_a_log_of_all_statistics_of_a_healthy_job_has_no_finding(tmp_path: Path, tensor: str) -> None:
    assert list(judged(tmp_path, {f"{tensor}_{stat}": value for stat, value in TENSOR.items()}, {})) == []


RESULTS_OF_GEMMS = {
    "output": ("fprop", "output", "activation"),
    "dgrad": ("dgrad", "grad_input", "gradient"),
    "wgrad": ("wgrad", "grad_weight", "gradient"),
}


@pytest.mark.parametrize("logged", RESULTS_OF_GEMMS)
@pytest.mark.parametrize("stat", ["max", "l1_norm", "cur_amax"])
def test_a_result_of_a_gemm_that_is_not_finite_is_found(tmp_path: Path, logged: str, stat: str) -> None:
    gemm, tensor, _ = RESULTS_OF_GEMMS[logged]
    (finding,) = judged(tmp_path, {f"{logged}_{stat}": 4.0}, {f"{logged}_{stat}": NAN})
    found = (finding.code, finding.name, finding.module, finding.gemm, finding.tensor)
    assert found == ("F103", "gemm-nonfinite", "blocks.1.fc2", gemm, tensor)
    assert "not all its operands were recorded" in finding.message and "1000000" not in finding.message


def test_a_gemm_of_finite_operands_is_accused(tmp_path: Path) -> None:
    operands = {f"{tensor}_{stat}": TENSOR[stat] for tensor in ("activation", "weight") for stat in ("cur_amax", "mse")}
    (finding,) = judged(tmp_path, {**operands, "output_max": 4.0}, {"output_max": INF})
    assert (finding.name, finding.module, finding.tensor) == ("gemm-nonfinite", "blocks.1.fc2", "output")
    assert finding.message.startswith("elements of the fprop output are NaN or Inf at step 100, and all operands were finite")
    (input_,) = judged(tmp_path / "b", {**operands, "output_max": 4.0}, {"output_max": INF, "activation_cur_amax": INF})
    assert (input_.name, input_.tensor) == ("nonfinite-from-outside", "input"), "the operand comes before the result"


def test_a_gradient_of_weights_that_overflows_once_is_loss_scaling(tmp_path: Path) -> None:
    def stats(layer: str, step: int) -> dict[str, float]:
        return {"wgrad_max": INF if step == 100 else 1.0, "dgrad_max": INF if step == 100 else 1.0}

    import_te_stats(written(tmp_path / "te", stats), tmp_path / "run")
    assert list(triage(Run(tmp_path / "run"))) == []


@pytest.mark.parametrize(
    "stats", [{"gradient_underflows%": 97.0}, {"gradient_scale_inv_min": 2e7, "gradient_scale_inv_max": 2e7}]
)
def test_what_begins_at_the_last_logged_step_is_a_warning(tmp_path: Path, stats: dict[str, float]) -> None:
    """No later step tells whether it lasts; before the last one such a step is passed over."""
    usual = {"gradient_underflows%": 0.1} if len(stats) == 1 else dict.fromkeys(stats, 0.01) | {"gradient_cur_amax": 4.0}

    def at(sick: int) -> Stats:
        return lambda layer, step: {**usual, **(stats if (layer, step) == ("blocks.1.fc2", sick) else {})}

    import_te_stats(written(tmp_path / "te", at(190)), tmp_path / "run")
    (finding,) = triage(Run(tmp_path / "run"))
    assert (finding.code, str(finding.severity), finding.module) == ("F128", "warning", "blocks.1.fc2")
    assert "the last of 20 sampled steps alone: log more to see whether it lasts" in finding.message
    import_te_stats(written(tmp_path / "te2", at(100)), tmp_path / "run2")
    assert list(triage(Run(tmp_path / "run2"))) == []


def test_a_gradient_that_overflows_once_is_loss_scaling(tmp_path: Path) -> None:
    steps = range(0, 200, 10)

    def stats(layer: str, step: int) -> dict[str, float]:
        return {"gradient_cur_amax": INF if step == 100 else 1.0, "gradient_underflows%": 0.1}

    import_te_stats(written(tmp_path / "te", stats, steps), tmp_path / "run")
    assert list(triage(Run(tmp_path / "run"))) == []


def test_a_log_of_first_steps_alone_is_judged_if_all_of_them_agree(tmp_path: Path) -> None:
    def stats(layer: str, step: int) -> dict[str, float]:
        return {"gradient_underflows%": 97.0 if layer == "blocks.1.fc2" else 0.1}

    import_te_stats(written(tmp_path / "te", stats, range(5)), tmp_path / "run")
    assert [(f.code, f.module) for f in triage(Run(tmp_path / "run"))] == [("F128", "blocks.1.fc2")]
    import_te_stats(written(tmp_path / "one", stats, range(5000, 5001)), tmp_path / "late")
    assert [(f.code, f.module) for f in triage(Run(tmp_path / "late"))] == [("F128", "blocks.1.fc2")], "warmed up long ago"
    import_te_stats(written(tmp_path / "two", stats, range(2)), tmp_path / "early")
    assert list(triage(Run(tmp_path / "early"))) == [], "layers that start at zero"


@pytest.mark.parametrize(
    ("stats", "recipe", "is_assumed"),
    [
        ({"gradient_underflows%": 97.0, "gradient_mxfp8_underflows%": 0.5}, "tensorwise_delayed", True),
        ({"gradient_underflows%": 0.5, "gradient_mxfp8_underflows%": 0.5}, "mxfp8", True),
        ({"gradient_underflows%": 0.5, "activation_overflows%": 0.0, "gradient_mxfp8_mse": 0.1}, "tensorwise_delayed", False),
        ({"gradient_underflows%": 0.5, "gradient_underflows%_columnwise": 0.6}, "blockwise_pow2", True),
        ({"gradient_nvfp4_underflows%": 8.0, "gradient_mxfp8_underflows%": 0.1}, "nvfp4", False),
        ({"gradient_fp8_delayed_scaling_mse": 0.1, "gradient_mxfp8_mse": 0.1}, "tensorwise_delayed", False),
    ],
)
def test_the_recipe_in_force(tmp_path: Path, stats: dict[str, float], recipe: str, is_assumed: bool) -> None:
    done = import_te_stats(written(tmp_path / "te", lambda layer, step: stats, range(2)), tmp_path / "run")
    assert (done.recipe, done.is_assumed) == (recipe, is_assumed)


def test_what_is_tried_beside_does_not_hide_what_runs(tmp_path: Path) -> None:
    (finding,) = judged(
        tmp_path, {"gradient_underflows%": 0.1, "gradient_mxfp8_underflows%": 0.1}, {"gradient_underflows%": 97.0}
    )
    assert (finding.code, finding.module, finding.value) == ("F128", "blocks.1.fc2", 0.97)


def test_nvfp4_is_judged(tmp_path: Path) -> None:
    stats = {"activation_nvfp4_underflows%": 9.0, "activation_nvfp4_mse": 0.01}
    (finding,) = judged(tmp_path, stats, {"activation_nvfp4_underflows%": 97.0})
    assert (finding.code, finding.module) == ("F128", "blocks.1.fc2")
