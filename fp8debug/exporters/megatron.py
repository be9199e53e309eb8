"""Megatron-LM and what builds on it: the file of ``--te-precision-config-file``, one per pipeline stage.

The first matcher that matches a module's path decides, and a recipe of no field is high precision inside an FP8 or FP4 job; a
module that leaves FP4 for FP8 has that recipe in place of the job's. The evaluation recipe is the training recipe: a model is
evaluated as it is trained. Paths are those below the GPTModel, and under pipeline parallelism their layer index counts from the
first layer of the stage, so one file for all stages would hit every stage.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fp8debug.exporters.base import EXPORTERS, Exporter, comments, header, limits, several, whole_modules, yaml_string

if TYPE_CHECKING:
    from fp8debug.fallback import Fallback
    from fp8debug.store.read.run import Run

_NOTHING: Mapping[str, Any] = {}
#: By precision the fields of a TEQuantizationRecipe (megatron-core 0.16.1).
RECIPES = {
    "bf16": "{}",
    "mxfp8": '{fp8_quantization_recipe: "mxfp8", fp8_format: "e4m3"}',
    "blockwise": '{fp8_quantization_recipe: "blockwise", fp8_format: "e4m3"}',
    "tensorwise": '{fp8_quantization_recipe: "tensorwise", fp8_format: "e4m3"}',
}
CONFIG = """  {name}:
    transformer_engine_config_type: "TEQuantizationParams"
    training_recipe: {recipe}
    evaluation_recipe: {recipe}
"""


class MegatronExporter(Exporter):
    """One matcher per module; a list for several pipeline stages becomes a file for each."""

    name = "megatron"
    suffix = ".yaml"

    def notes(self, run: Run, fallbacks: Sequence[Fallback]) -> list[str]:
        """Return what the file cannot say."""
        notes = limits(run, fallbacks, per_gemm=False, has_precisions=True)
        stages = _stages(run)
        shared = [m for m in whole_modules(run, fallbacks) if sum(m in names for names, _ in stages.values()) > 1]
        if shared:
            notes.append(
                "run has modules of one name on several pipeline stages and joins what they show, so the file of each of"
                f" these stages has them: {several(shared)}"
            )
        running = run.sql("SELECT DISTINCT cast_name FROM sites WHERE actual").to_pylist()
        if any(" delayed(" in str(row["cast_name"]) for row in running):
            notes.append("takes no precision per layer beside --fp8-recipe delayed; choose another recipe for the job")
        return notes

    def export(self, run: Run, fallbacks: Sequence[Fallback]) -> str:
        """Return the YAML document for all stages in one; what a job without pipeline parallelism wants."""
        return self._text(run, fallbacks, list(whole_modules(run, fallbacks)), "")

    def files(self, run: Run, fallbacks: Sequence[Fallback]) -> dict[str, str]:
        """Return one document per pipeline stage; a single one where there is one stage."""
        modules, stages = list(whole_modules(run, fallbacks)), _stages(run)
        if len(stages) < 2:
            return {"": self.export(run, fallbacks)}
        return {
            f".stage{stage}": self._text(
                run, fallbacks, [m for m in modules if m in names], f"pipeline stage {stage} only", before
            )
            for stage, (names, before) in sorted(stages.items())
        }

    def _text(
        self, run: Run, fallbacks: Sequence[Fallback], modules: Sequence[str], about: str, before: Mapping[str, Any] = _NOTHING
    ) -> str:
        first, *rest = header(run, self.name, self.notes(run, fallbacks))
        precision = whole_modules(run, fallbacks)
        used = ["bf16", *sorted({precision[module] for module in modules} - {"bf16"})]
        lines = [comments([first, *([f"for {about}"] if about else []), *rest]), "configs:\n"]
        lines += [CONFIG.format(name=name, recipe=RECIPES[name]) for name in used]
        lines.append("matchers:\n" if modules else "matchers: {}\n")
        for number, module in enumerate(modules):
            pattern = yaml_string(_glob(_in_stage(_below_model(module), before)))
            config = precision[module]
            lines.append(
                f"  fp8debug_{number}:\n    config: {config}\n    type: glob\n    pattern: {pattern}\n    enabled: true\n"
            )
        return "".join(lines)


def _below_model(fqn: str) -> str:
    """Return the path as Megatron matches it: without DDP's and Float16Module's ``module``, and without a chunk's number."""
    return re.sub(r"^(?:\d+\.)?(?:module\.)*", "", fqn)


def _in_stage(path: str, before: Mapping[str, Any]) -> str:
    """Return a path with its layer's number in the stage; ``before`` says how many layers the stages before it have."""
    for layers, count in before.items():
        head, _, rest = path.partition(f"{_below_model(layers)}.")
        number, dot, rest = rest.partition(".")
        if not head and number.isdecimal() and isinstance(count, int):
            return f"{_below_model(layers)}.{max(0, int(number) - count)}{dot}{rest}"
    return path


def _glob(path: str) -> str:
    """Return a pattern that fnmatch takes for this path alone."""
    return "".join(f"[{char}]" if char in "*?[" else char for char in path)


def _stages(run: Run) -> dict[int, tuple[set[str], Mapping[str, Any]]]:
    """Return by pipeline stage the modules that its ranks recorded, and how many layers come before its own."""
    stage_of: dict[int, int] = {}
    found: dict[int, tuple[set[str], Mapping[str, Any]]] = {}
    for rank, manifest in run.rank_manifests.items():
        mesh, before = manifest.get("mesh"), manifest.get("layers_before")
        stage = _coordinate(mesh, "pp") if isinstance(mesh, Mapping) else None
        if stage is not None:
            stage_of[int(rank)] = stage
            found.setdefault(stage, (set(), before if isinstance(before, Mapping) else {}))
    for row in run.sql("SELECT DISTINCT rank, module FROM raw WHERE module IS NOT NULL").to_pylist():
        if row["rank"] in stage_of:
            found[stage_of[row["rank"]]][0].add(row["module"])
    return found


def _coordinate(mesh: Mapping[str, Any], name: str) -> int | None:
    """Return a rank's place along a dimension of its mesh; a manifest may hold anything."""
    dims, places = mesh.get("dims"), mesh.get("coordinate")
    if not isinstance(dims, list) or not isinstance(places, list):
        return None
    place = dict(zip(dims, places, strict=False)).get(name) if all(isinstance(dim, str) for dim in dims) else None
    return place if isinstance(place, int) else None


EXPORTERS.add(MegatronExporter.name, MegatronExporter())
