"""``watch()``: from a target and options to a running recording."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from fp8debug import __version__
from fp8debug.adapters.interception.matrices import matrices_of
from fp8debug.adapters.watching.arguments import check_arguments, check_inference, own_optimizer, recipe_of, several
from fp8debug.adapters.watching.coverage import (
    Candidate,
    candidates_of,
    choose,
    common_recipe,
    modules_outside,
    nothing_to_watch,
    parameter_counts,
    roots_of,
)
from fp8debug.adapters.watching.disk_plan import manifest_entry, planned_volume, tell
from fp8debug.adapters.watching.dumps import Dumper, DumpLimits, load_safetensors
from fp8debug.adapters.watching.environment import describe_environment, git_state, rank_and_world
from fp8debug.adapters.watching.handle import Watch, say
from fp8debug.adapters.watching.pipeline import is_stage, rank_entry, stage_of
from fp8debug.adapters.watching.recipe_changes import RecipeChanges, check_guard
from fp8debug.adapters.watching.recording_ranks import StandbyWriter, check_ranks, num_recording, ranks_entry, records_from_start
from fp8debug.adapters.watching.resumption import Resumption
from fp8debug.adapters.watching.trainer_watch import TrainerWatch
from fp8debug.errors import AttachError
from fp8debug.fallback.guard import Guard
from fp8debug.observer.observer import Settings
from fp8debug.observer.sharding import describe_mesh
from fp8debug.recipes import Recipe
from fp8debug.store.dump_selectors import Selector, parse_selectors
from fp8debug.store.volume import Volume
from fp8debug.store.write.writer import RunWriter
from fp8debug.trackers.live import check_live, start_live
from fp8debug.trainers import loop_of

if TYPE_CHECKING:
    from fp8debug.rules.base import Finding

__all__ = ["Watch", "on_watch", "watch"]

#: Called when a watch begins; how ``fp8debug run`` learns that a script attaches itself.
on_watch: list[Callable[[], None]] = []


def watch(
    target: object,
    path: str | Path,
    *,
    every: int = 10,
    shadow_rows: int = 256,
    what_if: Sequence[str | Recipe] = ("tensorwise_delayed", "tensorwise_current"),
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    dump: Sequence[str] = (),
    optimizer: torch.optim.Optimizer | None = None,
    shadow: Literal["sample", "full"] = "sample",
    plain_recipe: str | Recipe = "blockwise",
    resume_from: int | None = None,
    checkpoint: str | Path | None = None,
    dump_max_bytes: int = 8 << 30,
    dump_memory_bytes: int = 1 << 30,
    dump_steps: int = 3,
    guard: Guard | None = None,
    check_finite: bool | None = None,
    compiled: Literal["auto", "repeat", "as_is", "eager"] = "auto",
    turns: int | None = None,
    ranks: Sequence[int] | Literal["all"] | None = None,
    budget: int | str | None = None,
    total_steps: int | None = None,
    inference: bool = False,
    to: object = (),
    on_finding: Callable[[Finding], object] | None = None,
) -> Watch:
    """Record the numerics of every FP8 GEMM of a model into a run directory; the training itself is not changed by a bit.

    In a model without FP8 modules every nn.Linear is tried under ``plain_recipe``: what would FP8 do to this run?

    Args:
        target: a module, a list of modules (pipeline chunks), or a trainer (docs/trainers.md), which then tells of its steps.
        path: the run directory; it must not hold a run yet.
        every: statistics are taken at steps 0, every, 2 * every, ...; loss and learning rate at all.
        shadow_rows: rows or columns in the shadow and exact GEMMs of a sampled step; fewer columns of a wide input
            (docs/numerics.md).
        what_if: recipes whose casts are recorded beside the running one.
        include: FQN globs of the modules to watch.
        exclude: FQN globs of those not to.
        dump: operands to write whole, such as ``"blocks.*.down:fprop:input@100:200"``, or the last sampled steps before a
            NaN, an Inf or a loss spike with ``"on-finding"`` (docs/dumps.md); needs ``pip install 'fp8debug[dumps]'``.
        optimizer: steps are counted from it, and the learning rate read; without it, from any torch optimizer that holds
            a parameter of the model. ``Watch.step()`` overrides both.
        shadow: ``full`` runs the shadow and exact GEMMs on all rows.
        plain_recipe: recipe for models that have no FP8 module.
        resume_from: number of the first step, when training goes on from a checkpoint into a folder that holds a run.
            Settings that are not those of the earlier part are printed, and found by F144.
        checkpoint: folder from which training goes on, or begins; its FP8 settings (``manifest.json`` of a run,
            ``quantization_config`` in ``config.json``) are compared with those in force.
        dump_max_bytes: disk space for the dumps of each rank; the oldest are deleted, those of a finding are kept.
        dump_memory_bytes: host memory of each rank for steps that are held and files that wait for the disk.
        dump_steps: sampled steps that ``on-finding`` holds.
        guard: puts a module into BF16 after hard evidence against it; changes the run when it fires, and only then.
        check_finite: search the steps between for the first NaN or Inf too, forward and backward, at the price of reading each
            FP8 GEMM's operands and result once; by default on a CPU only, where it is cheap beside the rest.
        compiled: how modules inside code under torch.compile are recorded. ``auto`` runs a sampled call of a compiled module once
            more, in eager code beside the trained one, which stays as it is (CUDA graphs included), where torch.compile made one
            graph of its forward, and one module after the other in turn. ``repeat`` repeats all that it can, at each sampled
            step, code between graphs too. ``as_is`` records Fp8Linear alone there. ``eager`` runs sampled steps without
            torch.compile, in eager arithmetic.
        turns: sampled steps in which each module is recorded once: after the first one, which records all, a sampled step
            records one in so many, neighbours together, at so much less of its cost; the others have no rows at that step. By
            default 1, but of compiled modules that ``auto`` repeats their number, at least 8.
        ranks: which global ranks record, rank 0 among them, or ``all``; by default all of up to 16, else those of the first
            data-parallel replica. The others begin when they see a loss, gradient norm or GEMM that is not finite.
        budget: disk space for the statistics of all ranks together, such as ``"50GB"``: ``every`` is chosen so that the plan
            stays within it, and of the default's ``ranks`` fewer record where that is not enough; a rank that reaches its share
            records loss and events alone (docs/robustness.md).
        total_steps: steps of the whole run, for the plan; a million by default.
        inference: record the forward passes without gradients, and no others: rollouts, generation, evaluation. A step is a call
            of the model, or what lies between two calls of ``Watch.step()``. A model may have a watch of each kind at once.
        to: trackers whose open run gets a few numbers of each sampled step, findings as alerts and the report: ``"wandb"``,
            ``"tensorboard"``, ``"mlflow"``, ``"trackio"``, or a run of theirs, such as a ``SummaryWriter`` (docs/trackers.md).
        on_finding: called in a thread of its own with each new warning or error (a ``fp8debug.Finding``) while training runs.

    Returns:
        The watch; also a context manager, closed at exit and on an exception.

    Raises:
        AttachError: nothing to watch in the target, or another watch has it.
        NoMatchError: a dump selects no module that is watched.
        RecordError: the folder holds a run already or cannot be written.
        UsageError: an argument out of range or an unknown recipe.
    """
    options = {name: value for name, value in locals().items() if name not in ("target", "path")}
    check_arguments(path, every, shadow_rows, shadow, optimizer, resume_from, check_finite, compiled, turns)
    check_inference(inference, target, optimizer=optimizer, guard=guard)
    trackers = check_live(to, on_finding)
    limits = DumpLimits(disk_bytes=dump_max_bytes, memory_bytes=dump_memory_bytes, ring_steps=dump_steps)
    settings = Settings(
        every=every,
        shadow_rows=shadow_rows if shadow == "sample" else None,
        what_if=tuple(recipe_of(r) for r in several(what_if)),
        plain_recipe=recipe_of(plain_recipe),
        check_finite=check_finite,
        inference=inference,
        turns=turns or 1,
    )
    check_ranks(ranks)
    for told in list(on_watch):
        told()
    if (loop := loop_of(target)) is not None:

        def begin(models: list[nn.Module], first_step: int | None) -> Watch:
            return watch(models, path, **{**options, "resume_from": first_step or resume_from})

        return TrainerWatch(loop, target, path, begin)
    roots = roots_of(target)
    candidates = candidates_of(roots, may_be_none=True)
    matrices = matrices_of(roots, candidates)
    if not candidates and not matrices:
        raise nothing_to_watch(roots)
    include, exclude = several(include), several(exclude)
    filters = choose([*candidates, *matrices], include, exclude)
    _check_unwatched(candidates, inference)
    check_guard(guard, candidates)
    rank, world_size = rank_and_world()
    mesh = describe_mesh(p for root in roots for p in root.parameters())
    num_ranks = num_recording(ranks, world_size, mesh)
    volume = planned_volume(candidates, settings, num_ranks, budget, total_steps, may_be_fewer=ranks is None)
    settings, every = replace(settings, every=volume.every), volume.every
    selectors = _selectors(dump, candidates, every)
    for root in roots:
        filters = [*getattr(root, "fp8debug_filters", []), *filters]
    manifest = {
        "fp8debug_version": __version__,
        "every": every,
        "inference": inference,
        "turns": settings.turns,
        "planned": manifest_entry(volume),
        "ranks": ranks_entry(ranks, world_size, volume.ranks),
        "shadow_rows": settings.shadow_rows,
        "what_if": [recipe.name for recipe in settings.what_if],
        "include": list(include),
        "exclude": list(exclude),
        "dump": [selector.text for selector in selectors],
        "recipe": common_recipe(candidates),
        "plain_recipe": settings.plain_recipe.name,
        "modules": [c.describe(i) for i, c in enumerate(candidates)],
        "filters": filters,
        "outside": modules_outside(roots),
        "environment": describe_environment(),
        "git": git_state(),
        "argv": sys.argv,
    }
    manifest["parameters"] = parameter_counts(roots, candidates, manifest["modules"])
    device = next((p.device for root in roots for p in root.parameters()), torch.device("cpu"))
    rank_manifest = {"device": str(device), "versions": {"torch": torch.__version__, "fp8debug": __version__}, "mesh": mesh}
    if rank and is_stage(mesh):
        rank_manifest |= {**rank_entry(roots, manifest["modules"]), "parameters": manifest["parameters"]}
    make = partial(
        RunWriter,
        path,
        rank=rank,
        world_size=world_size,
        manifest=manifest,
        rank_manifest=rank_manifest,
        resume=resume_from is not None,
        max_bytes=None if volume.budget is None else volume.budget // volume.ranks,
    )
    writer = make() if records_from_start(ranks, rank, world_size, mesh, volume.ranks) else StandbyWriter(make, path, rank)
    _announce(writer, rank, volume, filters)
    with ExitStack() as opened:  # closed in reverse where no watch begins
        opened.callback(writer.close)
        dumper = live = None
        if selectors and writer.stopped is None:
            dumper = Dumper(writer.path, rank, selectors, every, limits, lambda step, text: say(writer, step, text, kind="dump"))
            opened.callback(dumper.close)
        resumption = Resumption(writer, resume_from or 0, checkpoint, roots)
        changes = RecipeChanges(candidates, writer, resume_from or 0, guard, resumption, roots)
        resumption.compare(manifest)
        if rank == 0 and writer.stopped is None and (trackers or on_finding is not None):
            live = start_live(writer.path, trackers, on_finding)
        if live is not None:
            opened.callback(live.close)
        begun = Watch(
            candidates,
            roots,
            settings,
            writer,
            own_optimizer(optimizer),
            resume_from or 0,
            dumper,
            changes,
            compiled=compiled,
            turns=turns,
            stage=stage_of(mesh),
            matrices=matrices,
            live=live,
            include=include,
            exclude=exclude,
        )
        opened.pop_all()
    _collect()
    return begun


def _check_unwatched(candidates: Sequence[Candidate], inference: bool) -> None:
    for c in candidates:
        if c.reason is None and getattr(c.module, "inference_probe" if inference else "probe", None) is not None:
            raise AttachError(f"{c.fqn} is watched already; close the first watch before attaching another")


def _selectors(dump: Sequence[str] | str, candidates: Sequence[Candidate], every: int) -> list[Selector]:
    """Return what is dumped, with the library that writes it loaded: it is missed before the model is changed."""
    selectors = parse_selectors(several(dump), [c.fqn for c in candidates if c.reason is None], every)
    if selectors:
        load_safetensors()
    return selectors


def _announce(writer: RunWriter, rank: int, volume: Volume, filters: Sequence[dict[str, Any]]) -> None:
    """Print the plan for the disk, and the filters that match nothing."""
    if rank == 0 and writer.stopped is None:
        tell(volume)
    for f in filters:
        if not f["matched"]:
            say(writer, 0, f"{f['kind']} {f['pattern']!r} matches no Linear")


@cache
def _collect() -> None:
    """Have Python's garbage collector look at every object now, once a process.

    What importing and attaching made is enough for it to do so in one of the first steps, which it holds up for 0.1 to 0.2 s.
    """
    if gc.isenabled():
        gc.collect()
