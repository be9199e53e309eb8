"""Faults of coverage and of whole runs, planted in models that train, are named; healthy models have no finding."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fp8debug
from fp8debug.errors import UsageError
from fp8debug.rules import Findings
from tests.recording.models import batch, net, train
from tests.recording.moe import Routed

STEPS, AT, EVERY = 20, 8, 4


def judged(
    path: Path,
    model: nn.Module,
    *,
    steps: int = STEPS,
    lr: float = 1e-3,
    before: Callable[[fp8debug.Watch, int], None] | None = None,  # type: ignore[name-defined]  # not public
) -> Findings:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    with fp8debug.watch(model, path, every=EVERY, what_if=(), optimizer=optimizer) as watch:

        def after(step: int, loss: Tensor) -> None:
            if before:
                before(watch, step)
            watch.step(loss=loss)

        train(model, steps, optimizer, after=after)
    return fp8debug.triage(path)


def routed(recipe: str = "blockwise", *, num: int = 4, top: int = 1, dense: bool = False, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return fp8debug.convert(Routed(64, num, top, dense=dense, depth=1), recipe, overrides={"*.select": None})


def test_a_router_in_fp8_is_named(tmp_path: Path) -> None:
    model = routed()
    fp8debug.inject(model, "router_in_fp8", module="layers.0.moe.select")
    (finding,) = judged(tmp_path / "run", model)
    assert (finding.code, finding.module, finding.severity, finding.steps[0]) == ("F109", "layers.0.moe.select", "warning", 0)
    assert finding.value is not None and 0 < finding.value < 0.2, "the choices that flip are measured"


def test_a_head_in_fp8_that_nobody_asked_for_is_named(tmp_path: Path) -> None:
    model = net("blockwise", {"head": None})
    injection = fp8debug.inject(model, "unasked_fp8", module="head")
    (finding,) = judged(tmp_path / "run", model)
    assert (finding.code, finding.module, finding.steps[0]) == ("F110", "head", 0)
    injection.remove()
    assert type(model.head) is nn.Linear
    with pytest.raises(UsageError, match=r"blocks.0.up runs in FP8 already"):
        fp8debug.inject(model, "unasked_fp8", module="blocks.0.up")


def test_an_expert_without_tokens_is_no_data(tmp_path: Path) -> None:
    model = routed("tensorwise_delayed")
    fp8debug.inject(model, "starved_expert", module="layers.0.moe.parts.2.b", step=12)
    (finding,) = judged(tmp_path / "run", model, steps=24)
    assert (finding.code, finding.module, finding.steps) == ("F116", "layers.0.moe.parts.2.a", (12, 20))
    assert finding.also == ("layers.0.moe.parts.2.b", "layers.0.moe.parts.2.c")
    rows = fp8debug.Run(tmp_path / "run").table(module="layers.0.moe.parts.2.*", tensor="input", steps="12:").to_pylist()
    assert rows and all(row["numel"] == 0 and row["underflow_rate"] is None and row["sqnr_db"] is None for row in rows)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_inference_that_differs_is_found(tmp_path: Path) -> None:
    def compare(watch: fp8debug.Watch, step: int) -> None:  # type: ignore[name-defined]  # not public
        if step % EVERY == 0:
            watch.compare_inference(batch(1000)[0])

    assert judged(tmp_path / "healthy", net(), before=compare) == []
    model = net()
    fp8debug.inject(model, "stale_inference", module="blocks.1.down", step=AT)
    (finding,) = judged(tmp_path / "sick", model, before=compare)
    assert (finding.code, finding.module, finding.severity) == ("F122", "blocks.1.down", "warning")
    assert "its output in inference" in finding.message
    assert AT <= finding.steps[0] <= AT + EVERY


def test_a_gradient_of_zeros_is_told_from_a_frozen_part(tmp_path: Path) -> None:
    model = net("blockwise", {"head": None})
    fp8debug.inject(model, "no_gradient", step=AT)
    (finding,) = judged(tmp_path / "run", model)
    assert (finding.code, finding.module, finding.origin) == ("F143", "blocks.1.down", "outside")
    assert finding.steps[0] >= AT and "lost between the loss and there" in finding.message


def test_comparing_inference_does_not_change_training(tmp_path: Path) -> None:
    def losses(path: Path, *, compares: bool) -> list[float]:
        model = net("tensorwise_delayed")
        with fp8debug.watch(model, path, every=EVERY, what_if=()) as watch:

            def after(step: int, loss: Tensor) -> None:
                if compares:
                    watch.compare_inference(batch(1000)[0])
                    assert model.training
                watch.step(loss=loss)

            return train(model, 6, after=after)

    assert losses(tmp_path / "with", compares=True) == losses(tmp_path / "without", compares=False)


def test_a_path_of_ones_own_is_compared(tmp_path: Path) -> None:
    model = net()
    with fp8debug.watch(model, tmp_path / "run", what_if=()) as watch:
        watch.compare_inference(batch(0)[0], inference=lambda x: -model(x))
        watch.step(loss=1.0)
        with pytest.raises(UsageError, match=r"the two paths' logits have shapes \[96, 16\] and \[96, 15\]"):
            watch.compare_inference(batch(0)[0], inference=lambda x: model(x)[:, 1:])
    row = fp8debug.Run(tmp_path / "run").sql("SELECT inference_nmse, inference_flip_rate FROM steps").to_pylist()[0]
    assert row == {"inference_nmse": pytest.approx(4.0), "inference_flip_rate": 1.0}


def test_a_model_without_fp8_has_no_second_path(tmp_path: Path) -> None:
    with fp8debug.watch(net(None), tmp_path / "run") as watch, pytest.raises(UsageError, match="give inference="):
        watch.compare_inference(batch(0)[0])


def test_outliers_that_grow_with_depth(tmp_path: Path) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mix = nn.RMSNorm(128), nn.Linear(128, 128)

        def forward(self, x: Tensor) -> Tensor:
            return x + functional.gelu(self.mix(self.norm(x)))

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(Block() for _ in range(6)))
            self.head = nn.Linear(128, 16)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.layers(torch.cat([x, x.flip(-1)], -1)))
            return out

    def deep() -> nn.Module:
        torch.manual_seed(0)
        return fp8debug.convert(Deep(), "blockwise")

    assert judged(tmp_path / "healthy", deep()) == []
    model = deep()
    fp8debug.inject(model, "depth_outliers", module="layers.2.mix", step=AT)
    (finding,) = judged(tmp_path / "sick", model)
    assert (finding.code, finding.module, finding.steps[0]) == ("F124", "layers.5.mix", AT)


def test_a_loss_scale_that_overflows_again_and_again(tmp_path: Path) -> None:
    model = net("blockwise", {"head": None})
    fp8debug.inject(model, "loss_scale_loop", step=6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")
    with fp8debug.watch(model, tmp_path / "run", every=12, what_if=(), optimizer=optimizer) as watch:
        for step in range(26):
            x, classes = batch(step)
            loss = functional.cross_entropy(model(x), classes)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            watch.step(loss=loss, loss_scale=scaler.get_scale())
    (finding,) = fp8debug.triage(tmp_path / "run")
    assert (finding.code, finding.module, finding.steps[0]) == ("F126", None, 7)


def test_a_start_that_diverges_blames_no_layer(tmp_path: Path) -> None:
    model = net("tensorwise_delayed")
    fp8debug.inject(model, "lr_too_high")
    findings = judged(tmp_path / "run", model)
    assert (findings[0].code, findings[0].module, findings[0].steps[0]) == ("F127", None, 0), findings[0].message


@pytest.mark.parametrize(
    ("recipe", "num", "top", "dense"),
    [("tensorwise_delayed", 4, 2, False), ("mxfp8", 6, 1, False), ("rowwise", 2, 1, True)],
)
def test_a_healthy_mixture_has_no_finding(tmp_path: Path, recipe: str, num: int, top: int, dense: bool) -> None:
    assert judged(tmp_path / "run", routed(recipe, num=num, top=top, dense=dense, seed=num)) == []


def test_a_start_without_warm_up_is_healthy(tmp_path: Path) -> None:
    assert judged(tmp_path / "run", net(), lr=2e-2) == []


_TWO_RANKS = """
import gc, sys, torch, fp8debug
from torch import distributed, nn
from tests.recording.models import net, train
distributed.init_process_group("gloo")
for name in ("healthy", "sick"):
    model = net("blockwise", {"head": None})
    if name == "sick":
        fp8debug.inject(model, "rank_scale", module="blocks.1.down", step=4)
    parallel = nn.parallel.DistributedDataParallel(model)
    with fp8debug.watch(parallel, f"{sys.argv[1]}/{name}", every=4, what_if=()) as watch:
        train(parallel, 13, after=lambda _, loss: watch.step(loss=loss))
del parallel, watch
gc.collect()  # what still holds the group when it is destroyed leaves gloo threads that may abort the exit, pytorch#190489
distributed.destroy_process_group()
"""


def test_a_rank_whose_amax_comes_from_elsewhere(tmp_path: Path) -> None:
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29400 + os.getpid() % 500)}
    command = [sys.executable, "-W", "ignore", "-c", _TWO_RANKS, str(tmp_path)]
    jobs = [subprocess.Popen(command, env={**common, "RANK": str(r)}, stderr=subprocess.PIPE, text=True) for r in range(2)]
    errors = [job.communicate(timeout=300)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], errors
    assert fp8debug.triage(tmp_path / "healthy") == []
    (finding,) = fp8debug.triage(tmp_path / "sick")
    assert (finding.code, finding.module, finding.tensor, finding.steps[0]) == ("F114", "blocks.1.down", "weight", 4)


def test_a_weight_on_a_coarse_grid_is_named(tmp_path: Path) -> None:
    model = net()
    fp8debug.inject(model, "coarse_weight", module="blocks.1.down", step=0)
    (finding,) = judged(tmp_path / "run", model)
    assert (finding.code, finding.module, finding.severity) == ("F135", "blocks.1.down", "warning"), finding.message
    assert "so that something writes the weight back to a coarser grid" in finding.message


def test_a_weight_that_is_written_to_a_coarse_grid_from_a_step_on_is_named(tmp_path: Path) -> None:
    model = net()
    fp8debug.inject(model, "coarse_weight", module="blocks.1.down", step=AT)
    (finding,) = judged(tmp_path / "run", model)
    assert (finding.code, finding.module, finding.steps[0]) == ("F135", "blocks.1.down", AT), finding.message
    assert f"sampled steps from step {AT} on" in finding.message


def test_a_second_moment_that_underflows_is_named(tmp_path: Path) -> None:
    model = net()
    fp8debug.inject(model, "moment_underflow", module="blocks.1.down", step=AT)
    findings = judged(tmp_path / "run", model)
    assert [(f.code, f.module) for f in findings if f.severity > "info"] == [("F127", None)]
    assert f"the optimizer step {AT} changes the weight of blocks.1.down by " in findings[0].message
    assert "second moments are 0 under gradients that are not" in findings[0].message


def test_rows_of_padding_that_no_cast_writes_are_named(tmp_path: Path) -> None:
    for name, fill in (("cleared", 0), ("sick", 127)):
        model = net()
        fp8debug.inject(model, "unwritten_padding", module="blocks.1.down", step=AT, fill=fill)
        findings = judged(tmp_path / name, model)
        assert [(f.code, f.name, f.module, f.steps[0]) for f in findings] == (
            [("F103", "nonfinite-unwritten", "blocks.1.down", AT)] if fill else []
        )
    with pytest.raises(UsageError, match="needs an 8-bit cast with several scales and fill from 0 to 255"):
        fp8debug.inject(net("tensorwise_current"), "unwritten_padding", module="blocks.1.down")


def test_a_scale_from_an_empty_history_is_named(tmp_path: Path) -> None:
    model = net()
    fp8debug.inject(model, "empty_history", module="blocks.1.down", step=AT)
    (finding,) = judged(tmp_path / "run", model)
    assert (finding.code, finding.module, finding.steps[0]) == ("F113", "blocks.1.down", AT)
    assert "its scale_inv is 0, made from an amax of zero" in finding.message


@pytest.mark.parametrize("bits", [3, 24])
def test_a_count_of_steps_that_stands_is_named(tmp_path: Path, bits: int) -> None:
    model = net()
    injection = fp8debug.inject(model, "standing_count", step=AT, bits=bits)
    findings = judged(tmp_path / "run", model, steps=28)
    injection.remove()
    assert [(f.code, f.name, f.severity, f.module) for f in findings] == (
        [("F135", "step-count-stands", "warning", None)] if bits < 24 else []
    )


def test_removing_it_restores_the_count_of_steps() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    injection = fp8debug.inject(model, "standing_count")
    train(model, 14, optimizer)
    assert {float(state["step"]) for state in optimizer.state.values()} == {8.0}
    injection.remove()
    injection.remove()
    assert {float(state["step"]) for state in optimizer.state.values()} == {14.0}
    fp8debug.inject(model, "standing_count")
    with pytest.raises(UsageError, match="standing_count needs an optimizer with the state step, got SGD"):
        train(model, 1, torch.optim.SGD(model.parameters(), lr=1e-3))


@pytest.mark.parametrize("log2_smallest", [8.0, 126.0])
def test_a_second_moment_lost_in_a_checkpoint_is_named(tmp_path: Path, log2_smallest: float) -> None:
    model = net()
    fp8debug.inject(model, "lost_second_moment", step=24, log2_smallest=log2_smallest)
    findings = [f for f in judged(tmp_path / "run", model, steps=30) if f.severity > "info"]
    assert [(f.code, f.name, f.steps[0]) for f in findings] == (
        [("F127", "updates-out-of-size", 24)] if log2_smallest < 24 else []
    )
    assert not findings or "(a second moment lost)" in findings[0].message


def resumed(path: Path, model: nn.Module) -> Findings:
    """Train in two parts, of which the second one is resumed at step AT."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for start in (0, AT):
        with fp8debug.watch(model, path, every=EVERY, what_if=(), optimizer=optimizer, resume_from=start or None) as watch:
            train(model, AT, optimizer, after=lambda _, loss, watch=watch: watch.step(loss=loss))  # type: ignore[misc]  # bound now
    return fp8debug.triage(path)


def test_moments_that_a_resume_did_not_load_are_named(tmp_path: Path) -> None:
    assert resumed(tmp_path / "healthy", net()) == []
    model = net()
    fp8debug.inject(model, "emptied_moments", step=AT)
    (finding,) = resumed(tmp_path / "sick", model)
    assert (finding.code, finding.name, finding.steps) == ("F150", "moments-begin-anew", (AT, AT))


@pytest.mark.parametrize("scale", [2.0**16, 1.0])
def test_gradients_clipped_before_they_are_unscaled_are_named(tmp_path: Path, scale: float) -> None:
    model = net()
    fp8debug.inject(model, "clipped_while_scaled")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with fp8debug.watch(model, tmp_path / "run", every=EVERY, what_if=(), optimizer=optimizer) as watch:
        for step in range(STEPS):
            x, classes = batch(step)
            loss = functional.cross_entropy(model(x), classes)
            (loss * scale).backward()
            for p in model.parameters():
                assert p.grad is not None
                p.grad /= scale
            optimizer.step()
            norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]))
            assert norm <= 1.0001 / scale
            optimizer.zero_grad()
            watch.step(loss=loss, loss_scale=scale)
    found = [(f.code, f.name) for f in fp8debug.triage(tmp_path / "run")]
    assert found == ([("F126", "clipped-while-scaled")] if scale > 1 else [])


def test_weights_in_bf16_stand_still_at_a_small_learning_rate(tmp_path: Path) -> None:
    findings = judged(tmp_path / "sick", net().bfloat16(), lr=6e-6)
    assert {f.code for f in findings} == {"F135"}, [f.message for f in findings]
    assert {"blocks.0.up", "blocks.1.down"} <= {findings[0].module, *findings[0].also}
    assert judged(tmp_path / "clean", net(), lr=6e-6) == []


@pytest.mark.parametrize("module", ["blocks.0.up", "head"])
def test_a_bias_whose_gradient_is_never_written_is_named(tmp_path: Path, module: str) -> None:
    model = net("blockwise", {"head": None})
    fp8debug.inject(model, "unwritten_bias_gradient", module=module)
    (finding,) = judged(tmp_path / "run", model)
    assert (finding.code, finding.name, finding.module) == ("F151", "parameter-gradient-zero", module)
    assert f"the gradient of {module}.bias (float32" in finding.message
    with pytest.raises(UsageError, match="has no bias of its own; plant this fault in a Linear with one"):
        fp8debug.inject(net(), "unwritten_bias_gradient", module="blocks.0.gate")
