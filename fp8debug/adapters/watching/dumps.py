"""Dumps of whole operands while training goes on: held where, and written when; ``selectors`` says which.

The training step only starts a copy to the host; a thread writes the files. With ``on-finding`` the last sampled steps are
held in memory, and written when a NaN, an Inf or a spike of the loss appears. What does not fit into the memory or on the
disk is dropped and counted, and nobody waits.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fp8debug.errors import UsageError
from fp8debug.formats import FORMATS
from fp8debug.interruptions import is_ours
from fp8debug.kernels.reference import FORMAT_OF, Operand, as_cast_reads
from fp8debug.loss_spikes import SpikeDetector
from fp8debug.metrics import Source
from fp8debug.store import dump_files
from fp8debug.store.dump_selectors import ON_FINDING, Selector
from fp8debug.types import Gemm, TensorRole

#: How long close() waits for the disk before it gives up.
CLOSE_TIMEOUT_S = 120.0

_SAFETENSORS_NAMES = {
    **{dtype: FORMATS[name].safetensors_dtype for dtype, name in FORMAT_OF.items()},
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
}


def load_safetensors() -> Any:
    """Return the library that writes the files.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import safetensors.torch
    except ImportError:
        raise UsageError("dump= needs safetensors, which is not installed: pip install 'fp8debug[dumps]'") from None
    return safetensors.torch


@dataclass(kw_only=True)
class _Held:
    """An operand on its way to a file: tensors on the host, whose copies may be under way."""

    step: int
    site: tuple[str, str, str]
    call: int
    cast: Any
    actual: bool
    tensors: dict[str, Tensor]
    arrived: torch.cuda.Event | None
    num_bytes: int
    reason: str = ""


@dataclass
class _Site:
    """Dump state of one site: its selectors, and how often it was observed in the step under way."""

    selectors: list[Selector]
    step: int = -1
    call: int = -1


@dataclass(frozen=True, kw_only=True)
class DumpLimits:
    """Limits of dumps: bytes, files and time.

    Attributes:
        disk_bytes: of one rank's files; the oldest are deleted, those of a finding last.
        memory_bytes: on the host: steps held for a finding and files that wait for the disk.
        ring_steps: sampled steps that are held.
    """

    disk_bytes: int = 8 << 30
    memory_bytes: int = 1 << 30
    ring_steps: int = 3

    def __post_init__(self) -> None:
        names = {"dump_max_bytes": self.disk_bytes, "dump_memory_bytes": self.memory_bytes, "dump_steps": self.ring_steps}
        for name, value in names.items():
            if not isinstance(value, int) or value < 1:
                raise UsageError(f"{name} must be a whole number of at least 1, got {value!r}")


class Dumper:
    """Takes the operands that selectors name and writes them below a run's folder; nothing here raises.

    Args:
        run: the run's folder.
        rank: global rank.
        selectors: at least one.
        every: steps that are sampled are its multiples.
        limits: on disk and memory.
        tell: called with a step and a sentence for people and for the events.

    Attributes:
        num_dropped: operands that were not written for want of memory or disk.
        stopped: why dumping stopped, or None.
    """

    def __init__(
        self,
        run: Path,
        rank: int,
        selectors: Sequence[Selector],
        every: int,
        limits: DumpLimits,
        tell: Callable[[int, str], None],
    ) -> None:
        self.num_dropped = 0
        self.stopped: str | None = None
        self._run, self._rank, self._every = run.absolute(), rank, every
        self._selectors, self._limits, self._tell = list(selectors), limits, tell
        self._sites: dict[tuple[str, str, str], _Site] = {}
        self._ring: dict[int, list[_Held]] = {}
        self._held_bytes = 0
        self._lock = threading.RLock()
        self._spikes = SpikeDetector()
        self._judged = self._write_until = self._quiet_until = -1
        self._reason = ""
        self._files = _Files(self._run, rank, limits.disk_bytes)
        self._jobs: queue.SimpleQueue[_Held | None] = queue.SimpleQueue()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._work, name="fp8debug-dumps", daemon=True)
        self._thread.start()

    def observe(
        self, step: int, module: str, actual: bool, gemm: Gemm, tensor: TensorRole, reference: Tensor, operand: Operand
    ) -> None:
        """Take an operand if a selector names it; called inside the training step, which it never holds up.

        Args:
            step: the step under way.
            module: FQN.
            actual: False where FP8 is only tried.
            gemm: the GEMM that reads it.
            tensor: its role.
            reference: ``[rows, columns]`` in high precision.
            operand: as the GEMM reads it.
        """
        if self.stopped is not None or os.getpid() != self._pid:
            return
        try:
            with self._lock:
                self._observe(step, (module, str(gemm), str(tensor)), actual, reference, operand)
        except Exception as error:
            if not is_ours(error):
                raise
            self._stop(error)

    def _observe(self, step: int, key: tuple[str, str, str], actual: bool, reference: Tensor, operand: Operand) -> None:
        site = self._sites.get(key)
        if site is None:
            site = self._sites[key] = _Site([s for s in self._selectors if s.takes_site(*key)])
        if not site.selectors or not reference.numel():
            return
        site.call = site.call + 1 if site.step == step else 0
        site.step = step
        chosen = [s.text for s in site.selectors if not s.on_finding and s.takes_step(step)]
        is_ringed = any(s.on_finding for s in site.selectors)
        reason = self._reason if is_ringed and step <= self._write_until else next(iter(chosen), "")
        if not reason and not is_ringed:
            return
        tensors = {"reference": reference}
        cast = None
        if isinstance(operand, tuple):
            quantized, cast = operand
            tensors |= {"data": quantized.data.reshape(reference.shape), "scale_inv": quantized.scale_inv}
        num_bytes = sum(t.numel() * t.element_size() for t in tensors.values())
        if not self._make_room(step, num_bytes):
            self._drop(step, "the memory for dumps is full")
            return
        copies = {name: _to_host(t) for name, t in tensors.items()}
        arrived = None
        if reference.is_cuda:
            arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch's
            arrived.record(torch.cuda.current_stream(reference.device))
        held = _Held(
            step=step,
            site=key,
            call=site.call,
            cast=cast,
            actual=actual,
            tensors=copies,
            arrived=arrived,
            num_bytes=num_bytes,
            reason=reason,
        )
        self._held_bytes += num_bytes
        if reason:
            self._jobs.put(held)
        else:
            self._ring.setdefault(step, []).append(held)

    def _make_room(self, step: int, num_bytes: int) -> bool:
        """Forget the oldest steps held for a finding until so much fits; never the step under way."""
        while self._held_bytes + num_bytes > self._limits.memory_bytes:
            oldest = min(self._ring, default=step)
            if oldest >= step:
                return False
            self._forget(oldest)
        return True

    def _forget(self, step: int) -> None:
        self._held_bytes -= sum(held.num_bytes for held in self._ring.pop(step))

    def judge(self, step: int, nonfinite: Sequence[str], loss: float | None) -> None:
        """Look at a step whose statistics have arrived, and write what is held when something happened in it.

        Args:
            step: in rising order.
            nonfinite: a sentence for each site that shows its first NaN or Inf.
            loss: None when it is not known.
        """
        self._judged = step
        if self.stopped is not None or not any(s.on_finding for s in self._selectors):
            return
        about = self._about(loss)
        reason = nonfinite[0] if nonfinite else about
        with self._lock:
            if reason:
                if step > self._quiet_until:
                    self._write_ring(step, reason)
                self._quiet_until = step + self._every * self._limits.ring_steps
            for old in sorted(s for s in self._ring if s <= step)[: -self._limits.ring_steps]:
                self._forget(old)

    def _about(self, loss: float | None) -> str:
        if loss is None:
            return ""
        if not isfinite(loss):
            return f"the loss is {loss}"
        return f"the loss spikes to {loss:.4g}" if self._spikes.see(loss) else ""

    def _write_ring(self, step: int, reason: str) -> None:
        """Write what is held up to the first sampled step that shows what happened."""
        self._write_until = -(-step // self._every) * self._every
        self._reason = f"{ON_FINDING}: step {step}: {reason}"
        steps = sorted(s for s in self._ring if s <= self._write_until)
        for at in steps:
            for held in self._ring.pop(at):
                held.reason = self._reason
                self._jobs.put(held)
        names = ", ".join(map(str, steps)) or "none, nothing was held"
        self._tell(step, f"dumps of steps {names} are written because of step {step}: {reason}")

    def _drop(self, step: int, why: str) -> None:
        self.num_dropped += 1
        if self.num_dropped == 1:
            way_out = "select fewer sites or raise dump_memory_bytes= or dump_max_bytes="
            self._tell(step, f"a dump was dropped: {why}; more are only counted; {way_out}")

    def _stop(self, error: Exception) -> None:
        with self._lock:
            if self.stopped is None:
                self.stopped = _in_words(error)
                self._ring.clear()
                self._tell(max(self._judged, 0), f"dumping stopped: {self.stopped}")

    def _work(self) -> None:
        while (held := self._jobs.get()) is not None:
            try:
                if self.stopped is None:
                    self._write(held)
            except Exception as error:  # a thread's traceback helps nobody, and training must go on
                self._stop(error)
            finally:
                with self._lock:
                    self._held_bytes -= held.num_bytes
                held.tensors.clear()

    def _write(self, held: _Held) -> None:
        if held.arrived is not None:
            held.arrived.synchronize()
        tensors = {name: t.contiguous() for name, t in held.tensors.items()}
        shape = (tensors["reference"].shape[0], tensors["reference"].shape[1])
        tile = (dump_files.TILE, dump_files.TILE)
        if held.cast is not None:
            tile = dump_files.tile_of(held.cast.granularity)
            read = tensors["reference"]
            if held.cast.hadamard:
                read = as_cast_reads(Source(read), held.cast).value.contiguous()
            pairs = [(_raw(t), _SAFETENSORS_NAMES[t.dtype]) for t in (read, tensors["data"])]
            scale_inv = tensors["scale_inv"].numpy()
            maps = dump_files.block_errors(pairs[0], pairs[1], scale_inv, held.cast.granularity, shape)
            tensors |= {name: torch.from_numpy(values) for name, values in maps.items()}
        metadata = {
            "kind": dump_files.KIND,
            **dict(zip(("module", "gemm", "tensor"), held.site, strict=True)),
            "cast": "" if held.cast is None else str(held.cast),
            "granularity": "" if held.cast is None else held.cast.granularity,
            "actual": "true" if held.actual else "false",
            **{name: str(value) for name, value in (("step", held.step), ("rank", self._rank), ("call", held.call))},
            "shape": f"{shape[0]},{shape[1]}",
            "tile": f"{tile[0]},{tile[1]}",
            "reason": held.reason,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        if self._files.make_room(held.step, size):
            path = dump_files.rank_folder(self._run, held.step, self._rank) / dump_files.file_name(*held.site, held.call)
            self._files.add(held.step, held.reason.startswith(ON_FINDING), path, _save(tensors, path, metadata))
        else:
            with self._lock:
                self._drop(held.step, "the disk space for dumps is used up")

    def close(self) -> None:
        """Write what waits and end the thread; what is held for a finding that never came is forgotten."""
        if os.getpid() != self._pid or not self._thread.is_alive():
            return
        self._jobs.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            print(f"fp8debug: gave up waiting for dumps after {CLOSE_TIMEOUT_S:.0f} s; the last are missing", file=sys.stderr)
        elif self.num_dropped > 1:
            self._tell(max(self._judged, 0), f"{self.num_dropped} dumps were dropped")


@dataclass
class _Files:
    """The files of one rank and how much they take."""

    run: Path
    rank: int
    max_bytes: int
    _plain: list[tuple[int, Path, int]] = field(default_factory=list)
    _total: int = 0

    def __post_init__(self) -> None:
        for step, rank, path in dump_files.find_dumps(self.run):
            if rank == self.rank:  # of a run that was resumed
                self.add(step, True, path, path.stat().st_size)

    def make_room(self, step: int, num_bytes: int) -> bool:
        """Delete the files of earlier steps, oldest first, until so much fits; those of a finding stay."""
        while self._total + num_bytes > self.max_bytes:
            if not self._plain or self._plain[0][0] >= step:
                return False
            _, path, size = self._plain.pop(0)
            self._total -= size
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                path.parent.rmdir()
                path.parent.parent.rmdir()
        return True

    def add(self, step: int, is_finding: bool, path: Path, num_bytes: int) -> None:
        """Count a file."""
        self._total += num_bytes
        if not is_finding:
            self._plain.append((step, path, num_bytes))


def _save(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> int:
    """Write a file whole or not at all; return its size."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode & 0o777  # safetensors makes files that nobody else can read
        load_safetensors().save_file(tensors, temporary, metadata)
        temporary.chmod(mode)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path.stat().st_size


def _to_host(tensor: Tensor) -> Tensor:
    """Return a copy on the host; of a tensor on a GPU it is only under way."""
    tensor = tensor.detach()
    if not tensor.is_cuda:
        return tensor.clone()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def _raw(tensor: Tensor) -> np.ndarray[Any, Any]:
    flat = tensor.reshape(-1)
    return (flat.view(torch.uint8) if flat.numel() else flat.to(torch.uint8)).numpy()


def _in_words(error: Exception) -> str:
    """Return the reason alone: safetensors wraps the operating system's."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return text.splitlines()[0].rpartition("I/O error: ")[2]
