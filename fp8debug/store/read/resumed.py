"""A run and its resumed parts in folders of their own, read as one: a later part replaces the earlier from its first step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from fp8debug.errors import RunError, UsageError
from fp8debug.store.read.files import RunFiles, scan
from fp8debug.store.read.run import Run

#: Numbers of parts of one folder lie below it.
_FOLDER = 10**7


class JoinedRun(Run):
    """Several folders as one run; manifest and name are those of the last part.

    Args:
        paths: the folders of the run and its resumed parts, in any order.

    Attributes:
        paths: the folders, in order of their first steps.
        starts: those steps.
        manifests: their manifests.

    Raises:
        RunError: one of them cannot be read.
        UsageError: two begin at the same step, which is two runs and not one that was resumed.
    """

    def __init__(self, paths: Sequence[str | Path]) -> None:
        parts = sorted((Run(path) for path in paths), key=lambda part: part.steps_range[0])
        if not parts:
            raise UsageError("no run was given")
        self.starts = [part.steps_range[0] for part in parts]
        for before, after in pairwise(parts):
            if before.steps_range[0] == after.steps_range[0]:
                raise UsageError(
                    f"{before.path} and {after.path} both begin at step {after.steps_range[0]}: these are two runs, not a run"
                    " and its resumed part; compare them with fp8debug diff"
                )
        self.paths = [part.path for part in parts]
        self.manifests = [part.manifest for part in parts]
        super().__init__(self.paths[-1])

    def __repr__(self) -> str:
        return f"JoinedRun({[str(path) for path in self.paths]!r})"

    def _folders(self) -> Sequence[Path]:
        return self.paths

    def _scan(self) -> RunFiles:
        joined: RunFiles | None = None
        for place, path in enumerate(self.paths):
            files = scan(path, self._damaged)
            end = self.starts[place + 1] if place + 1 < len(self.paths) else None
            if joined is None:
                joined = RunFiles(files.manifest, files.rank_manifests)
            joined.manifest, joined.rank_manifests = files.manifest, files.rank_manifests
            joined.problems += files.problems
            for before, sources in files.sources.items():
                bounds = [bound for bound in (before, end) if bound is not None]
                numbered = [replace(source, number=source.number + place * _FOLDER) for source in sources]
                joined.sources.setdefault(min(bounds, default=None), []).extend(numbered)
        if joined is None:
            raise RunError("no run was given")
        return joined


def open_runs(paths: Sequence[str | Path]) -> Run:
    """Open one run, or a run with its resumed parts as one.

    Raises:
        UsageError: paths is no list of folders.
    """
    if not isinstance(paths, Sequence):
        raise UsageError(f"expected a run, its folder, or the folders of its parts, got {type(paths).__name__}")
    return Run(paths[0]) if len(paths) == 1 else JoinedRun(paths)
