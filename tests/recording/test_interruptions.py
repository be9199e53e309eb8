"""Exceptions of the program that arise inside fp8debug's code: they reach the program, and the recording goes on."""

from __future__ import annotations

import ast
import ctypes
import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack

import fp8debug
from fp8debug.interruptions import is_ours
from fp8debug.observer.observer import Observer
from fp8debug.observer.probe import Probe
from tests.scaled_mm import NEEDS_SCALED_MM

PACKAGE = Path(fp8debug.__file__).parent
E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
SIGNAL = getattr(signal, "SIGUSR1", signal.SIGINT)


class TimeUp(Exception):  # noqa: N818  # as such classes are named
    """A program's own."""


class Handler:
    """Handlers of other kinds than a function."""

    def method(self, number: int, frame: FrameType | None) -> None:
        raise TimeUp

    def __call__(self, number: int, frame: FrameType | None) -> None:
        raise TimeUp


def ring(number: int, frame: FrameType | None) -> None:
    raise TimeUp("time limit")


def ring_forgetfully(number: int, frame: FrameType | None) -> None:
    del frame
    raise ValueError("time limit")


def ring_once(*args: Any) -> None:
    signal.signal(SIGNAL, signal.SIG_IGN)
    raise TimeoutError


def ring_deeply(number: int, frame: FrameType | None) -> None:
    def stop() -> None:
        raise MemoryError("no time left")

    stop()


def with_more(more: str, number: int, frame: FrameType | None) -> None:
    raise RuntimeError(more)


def leave(number: int, frame: FrameType | None) -> None:
    sys.exit(3)


HANDLERS: list[Callable[[int, FrameType | None], Any]] = [
    ring,
    ring_forgetfully,
    ring_once,
    ring_deeply,
    leave,
    Handler().method,
    Handler(),
    functools.partial(with_more, "time limit"),
]


@pytest.fixture
def handling() -> Iterator[Callable[[Any], object]]:
    before = signal.getsignal(SIGNAL)
    yield lambda handler: signal.signal(SIGNAL, handler)
    signal.signal(SIGNAL, before)


def judged(call: Callable[[], Any]) -> bool:
    try:
        call()
    except BaseException as error:
        return is_ours(error)
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("handler", HANDLERS)
def test_what_a_signal_handler_raises_is_not_ours(handling: Callable[[Any], object], handler: Any) -> None:
    handling(handler)
    assert not judged(lambda: signal.raise_signal(SIGNAL))

    def translated() -> None:
        try:
            signal.raise_signal(SIGNAL)
        except BaseException as error:
            raise RuntimeError("compilation failed") from error

    def in_context() -> None:
        try:
            signal.raise_signal(SIGNAL)
        except BaseException:
            raise RuntimeError("compilation failed") from None

    handling(handler)
    assert not judged(translated)
    handling(handler)
    assert not judged(in_context)


def test_what_the_program_handles_while_it_calls_us_is_no_matter(handling: Callable[[Any], object]) -> None:
    handling(ring)
    try:
        signal.raise_signal(SIGNAL)
    except TimeUp:
        assert judged(lambda: torch.ones(2) @ torch.ones(3))


@pytest.mark.parametrize("kind", [TimeUp, TimeoutError])
def test_what_another_thread_injects_is_not_ours(kind: type[Exception]) -> None:
    thread, never = threading.get_ident(), threading.Event()

    def inject() -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))

    for _ in range(20):
        threading.Timer(0.2, inject).start()
        with pytest.raises(kind) as found:
            for _ in range(100):
                never.wait(0.05)
        trace: Any = found.value.__traceback__
        while trace.tb_next is not None and trace.tb_frame.f_globals.get("__name__") == __name__:
            trace = trace.tb_next  # as if fp8debug had called what ran
        if trace.tb_frame.f_globals.get("__name__") != __name__:  # else it came between two calls
            break
    assert not is_ours(found.value.with_traceback(trace))


class Sick(nn.Linear):
    """A module whose weight raises an error of its own class."""

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise TimeUp("no weight")
        return super().__getattr__(name)


def test_what_the_programs_code_raises_that_we_call_is_ours() -> None:
    class Bad(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise TimeUp("no ops")

    assert judged(lambda: Sick(4, 4).weight)
    assert judged(lambda: torch.ones(2).as_subclass(Bad) + 1)
    assert judged(lambda: torch.ones(2) @ torch.ones(3))
    assert judged(lambda: int("x"))
    assert judged(lambda: [][1])


class ScaledMm(torch.autograd.Function):
    """The three GEMMs of a Linear by torch's own FP8 op."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        xs, ws = torch.tensor(0.02), torch.tensor(0.001)
        xq, wq = (x / xs).to(E4), (w / ws).to(E4)
        ctx.save_for_backward(xq, wq, xs, ws)
        return torch._scaled_mm(xq, wq.t(), scale_a=xs, scale_b=ws, out_dtype=torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,), (xq, wq, xs, ws), gs = grads, ctx.saved_tensors, torch.tensor(1e-6)
        gq = (g / gs).to(E5)
        gx = torch._scaled_mm(gq, wq.t().contiguous().t(), scale_a=gs, scale_b=ws, out_dtype=torch.bfloat16)
        gw = torch._scaled_mm(gq.t().contiguous(), xq.t().contiguous().t(), scale_a=gs, scale_b=xs, out_dtype=torch.bfloat16)
        return gx, gw


class TheirLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = ScaledMm.apply(input, self.weight)
        return out


class Bell:
    """Raises the signal at the n-th line of fp8debug's code that this thread runs; counts the lines."""

    def __init__(self, at: int) -> None:
        self.at, self.lines, self.where = at, 0, ""

    def __enter__(self) -> Bell:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(str(PACKAGE)):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                signal.raise_signal(SIGNAL)
        return self._trace


STEPS, PARTS = 4, 6


def trained(path: Path, at: int) -> tuple[Bell, int, int]:
    """Train for some steps, interrupted once; return the bell, how often it reached the program, and the steps closed."""
    torch.manual_seed(0)
    ours, theirs = fp8debug.convert(nn.Linear(32, 32), "blockwise"), TheirLinear(32, 16, bias=False)
    model = nn.Sequential(ours, nn.GELU(), theirs).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch = fp8debug.watch(model, path, every=1, optimizer=optimizer)
    x, reached, bell = torch.randn(16, 32).bfloat16(), 0, Bell(at)
    with bell:
        for _ in range(STEPS):
            try:
                loss = model(x).float().square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                watch.step(loss=loss.detach())
            except TimeUp:
                reached += 1
                assert torch.is_grad_enabled()
                optimizer.zero_grad()
        steps = watch.current_step
        try:
            watch.close()
        except TimeUp:
            reached += 1
    watch.close()
    assert torch.is_grad_enabled() and not _len_torch_dispatch_stack()
    assert not ours._forward_hooks and not theirs._forward_hooks, bell.where
    return bell, reached, steps


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, int]:
    """Return how many lines of fp8debug's code a training runs that nothing interrupts, and how many sites a step has."""
    path = tmp_path_factory.mktemp("whole")
    trained(path / "first", 0)  # what is imported once is
    bell, reached, steps = trained(path / "run", 0)
    assert not reached and steps == STEPS and bell.lines > 500
    return bell.lines, fp8debug.Run(path / "run").sql("SELECT count(*) AS n FROM sites WHERE step = 3").to_pylist()[0]["n"]


@NEEDS_SCALED_MM
@pytest.mark.parametrize("part", range(PARTS))
def test_a_signal_at_any_line_reaches_the_program_and_the_recording_goes_on(
    tmp_path: Path, handling: Callable[[Any], object], whole: tuple[int, int], part: int
) -> None:
    handling(ring)
    (lines, sites), places = whole, set()
    for at in range(7, lines, lines // 30)[part::PARTS]:
        path = tmp_path / f"run{at}"
        rung, reached, steps = trained(path, at)
        places.add(rung.where)
        assert reached == 1, f"{rung.where} swallowed it"
        run = fp8debug.Run(path)
        closed = run.sql("SELECT step FROM steps ORDER BY step").to_pydict()["step"]
        assert closed in (list(range(steps)), list(range(steps + 1))), rung.where  # close() ends the step that was cut short
        said = run.sql("SELECT message FROM events WHERE kind IN ('skipped', 'recording')").to_pydict()["message"]
        assert not [m for m in said if "any more" in m or "stopped" in m], (rung.where, said)
        twice = "SELECT count(*) AS n FROM raw GROUP BY step, rank, module, gemm, tensor, cast_name, reference HAVING n > 1"
        assert not run.sql(twice).num_rows, rung.where
        if steps >= STEPS - 1 and "close" not in rung.where:
            per_step = run.sql("SELECT step, count(*) AS n FROM sites GROUP BY step ORDER BY step").to_pydict()["n"]
            assert per_step.count(sites) >= STEPS - 2, (rung.where, per_step, sites)
        problems = run.problems
        assert not problems, (rung.where, problems)
    assert len(places) > 1


def test_a_time_limit_in_a_trainer_callback_reaches_the_program(tmp_path: Path, handling: Callable[[Any], object]) -> None:
    from fp8debug.adapters.watching.trainer_watch import TrainerWatch

    class Loop:
        name = "loop"

        def attach(self, target: Any, recorder: Any) -> Callable[[], None]:
            return lambda: None

    def begin(models: Any, first: Any) -> Any:
        signal.raise_signal(SIGNAL)

    handling(ring)
    loop: Any = Loop()
    watch = TrainerWatch(loop, object(), tmp_path / "run", begin)
    with pytest.raises(TimeUp):
        watch.begin([])
    watch.close()


@NEEDS_SCALED_MM
def test_a_module_is_watched_again_after_the_interruption(
    tmp_path: Path, handling: Callable[[Any], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Probe._operand
    rung: list[bool] = []

    def slow(self: Probe, *args: Any, **kwargs: Any) -> Any:
        if not rung and self.observer.step == 1:
            rung.append(True)
            signal.raise_signal(SIGNAL)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(Probe, "_operand", slow)
    handling(ring)
    _, reached, steps = trained(tmp_path / "run", 0)
    assert reached == 1 and steps == STEPS - 1
    run = fp8debug.Run(tmp_path / "run")
    counts = run.sql("SELECT step, count(DISTINCT module) AS n FROM sites GROUP BY step ORDER BY step").to_pylist()
    assert counts[0] == {"step": 0, "n": 2} and counts[-1] == {"step": 2, "n": 2}
    said = run.sql("SELECT message FROM events WHERE kind = 'skipped' AND message LIKE '%TimeUp%'").to_pydict()["message"]
    assert said == ["0 is not recorded in full at step 1: TimeUp was raised while it was recorded"]


def test_the_observer_closes_a_step_once_however_it_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8debug.observer.observer import Settings
    from fp8debug.recipes import get_recipe

    taken: list[int] = []
    observer = Observer(Settings(every=1, plain_recipe=get_recipe("blockwise")), lambda f: taken.append(f.step), lambda *_: None)

    def stop() -> None:
        raise KeyboardInterrupt

    let_go: list[int] = []
    observer.on_end_step += [stop, lambda: let_go.append(observer.step)]
    with pytest.raises(KeyboardInterrupt):
        observer.end_step({"loss": 1.0})
    assert taken == [0] and observer.step == 1 and let_go == [1]
    observer.on_end_step.remove(stop)
    monkeypatch.setattr(observer, "hand_over", stop)
    with pytest.raises(KeyboardInterrupt):
        observer.end_step({"loss": 2.0})
    monkeypatch.undo()
    observer.end_step({"loss": 3.0})
    assert taken == [0, 1, 2] and observer.step == 3


#: Files of the recording half, whose code runs inside the program's training.
RECORDING = (
    *("observer/*", "linear"),
    *("fallback/guard", "fallback/schedule", "run/*"),
    *("adapters/**/*", "trainers/*", "startup/*", "kernels/**/*", "faults/*", "store/write/writer", "store/write/worker"),
)
#: What else an ``except`` may catch that a signal handler raises as a matter of course.
BROAD = {"Exception", "BaseException", "OSError", "RuntimeError", "MemoryError", "torch.OutOfMemoryError", "TimeoutError"}
#: Code that runs in a thread of fp8debug's own, where no signal handler of the program does, or before training.
ELSEWHERE = {
    ("store/write/worker.py", "_work"): "the worker's thread",
    ("store/write/worker.py", "_guarded"): "the worker's thread",
    ("store/write/worker.py", "_make"): "the worker's thread",
    ("store/write/writer.py", "job"): "the worker's thread",
    ("store/write/writer.py", "_failed"): "the worker's thread",
    ("store/write/writer.py", "_release"): "the worker's thread, and an open that has failed",
    ("store/write/writer.py", "_read_json"): "the worker's thread",
    ("adapters/watching/dumps.py", "_work"): "the dumper's thread",
    ("adapters/watching/dumps.py", "make_room"): "the dumper's thread",
    ("run/arms.py", "read"): "before training",
}


def handlers(path: Path) -> Iterator[tuple[str, ast.ExceptHandler | ast.With]]:
    """Yield every broad ``except`` and ``suppress`` of a file, with the function that it is in."""

    def walk(node: ast.AST, function: str) -> Iterator[tuple[str, ast.ExceptHandler | ast.With]]:
        for child in ast.iter_child_nodes(node):
            inside = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
            if isinstance(child, ast.ExceptHandler) and is_broad(child.type):
                yield inside, child
            if isinstance(child, ast.With):
                for item in child.items:
                    call = item.context_expr
                    if (
                        isinstance(call, ast.Call)
                        and ast.unparse(call.func).endswith("suppress")
                        and any(map(is_broad, call.args))
                    ):
                        yield inside, child
            yield from walk(child, inside)

    def is_suppress(call: ast.Call) -> bool:
        return ast.unparse(call.func).endswith("suppress")

    def is_broad(kind: ast.expr | None) -> bool:
        kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
        return any(one is None or isinstance(one, ast.Starred) or ast.unparse(one) in BROAD for one in kinds)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), "")


def lets_through(handler: ast.ExceptHandler | ast.With) -> bool:
    """Return whether a handler asks is_ours, or raises again whatever it caught."""
    if isinstance(handler, ast.With):
        return False
    asks = any(isinstance(n, ast.Call) and ast.unparse(n.func) == "is_ours" for n in ast.walk(handler))
    raises = any(isinstance(n, ast.Raise) for n in ast.walk(handler))
    last = handler.body[-1]
    return (asks and raises) or (isinstance(last, ast.Raise) and last.exc is None)


def test_every_broad_except_lets_the_programs_exceptions_through() -> None:
    files = [path for pattern in RECORDING for path in sorted(PACKAGE.glob(f"{pattern}.py"))]
    assert len(files) > 60
    wrong, used = [], set()
    for path in files:
        name = path.relative_to(PACKAGE).as_posix()
        for function, handler in handlers(path):
            if (name, function) in ELSEWHERE:
                used.add((name, function))
            elif not lets_through(handler):
                wrong.append(f"{name}:{handler.lineno} in {function}")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Try) and any(isinstance(n, ast.Return) for s in node.finalbody for n in ast.walk(s)):
                wrong.append(f"{name}:{node.lineno}: return in finally")
    assert not wrong, "\n".join(wrong)
    assert used == set(ELSEWHERE)
