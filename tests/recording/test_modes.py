"""Recording under every state that a program can put torch in: default dtype and device, autocast, and its many modes."""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fp8debug
from fp8debug.kernels.torch_state import is_under_dynamo, skipped_by_dynamo
from tests.recording.models import rows_of
from tests.training import losses_of, watched

PACKAGE = Path(fp8debug.__file__).parent
#: Functions of torch that make a tensor out of nothing: their dtype and device are the program's defaults unless named.
FACTORIES = {
    *("arange", "asarray", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "normal", "ones"),
    *("rand", "randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "zeros"),
}
RECIPES = ("blockwise", "blockwise_e8m0", "tensorwise_delayed", "rowwise", "mxfp8")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def test_every_tensor_of_ours_names_its_dtype_and_its_device() -> None:
    bare = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and _is_factory(node.func):
                missing = {"dtype", "device"} - {keyword.arg for keyword in node.keywords}
                bare += [f"{path.relative_to(PACKAGE)}:{node.lineno} has no {name}" for name in sorted(missing)]
            elif isinstance(node, ast.Attribute) and node.attr == "ldexp" and _is_torch(node.value):
                bare.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: torch.ldexp computes in the default dtype")
    assert not bare


def test_a_random_number_of_ours_comes_from_a_generator_of_ours() -> None:
    drawn = {"bernoulli", "dropout", "multinomial", "normal", "poisson", "rand", "randint", "randn", "randperm"}
    shared = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            name, keywords = node.func.attr.removesuffix("_like"), {keyword.arg for keyword in node.keywords}
            if _is_torch(node.func.value) and name in drawn and "generator" not in keywords:
                shared.append(f"{path.relative_to(PACKAGE)}:{node.lineno} {node.func.attr}")
            elif node.func.attr in ("bernoulli_", "exponential_", "normal_", "random_", "uniform_", "manual_seed_all"):
                shared.append(f"{path.relative_to(PACKAGE)}:{node.lineno} {node.func.attr}")
    assert not shared


def _is_factory(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and function.attr in FACTORIES and _is_torch(function.value)


def _is_torch(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id == "torch"


def _net(kind: str | None) -> nn.Module:
    """Return a model in FP32 whatever the default dtype; ``torchao`` or a recipe names how it is converted."""
    made: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    model = nn.Sequential(nn.Linear(64, 96, **made), nn.SiLU(), nn.Linear(96, 64, bias=False, **made))
    generator = torch.Generator("cpu").manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float32, device="cpu") / 10)
    if kind == "torchao":
        float8 = pytest.importorskip("torchao.float8")
        model = float8.convert_to_float8_training(model, config=float8.Float8LinearConfig(emulate=True))
    elif kind is not None:
        fp8debug.convert(model, kind)
    return model


def _batch(step: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(step)
    return torch.randn(32, 64, generator=generator, dtype=torch.float32, device="cpu")


State = Callable[[int], AbstractContextManager[Any]]


def _train(kind: str | None, path: Path | None, state: State, num_steps: int = 4) -> list[float]:
    """Return the losses of a training whose every step, that of the watch included, runs in a state of torch."""
    model, losses = _net(kind), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with state(-1):
        watch = watched(model, path, every=1)
    with watch as recording:
        for step in range(num_steps):
            x = _batch(step)
            with state(step):
                loss = (model(x).float() - x).square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if recording is not None:
                with state(step):
                    recording.step(loss=loss)
    return losses


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]  # a property of the module
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]  # as above
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]  # as above


class _Zeroing(TorchFunctionMode):
    """Makes zeros of what is turned into FP64, which statistics are and no model here is: a mode that replaces ops."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return torch.zeros_like(result) if func is Tensor.double else result


class _Counting(TorchDispatchMode):
    """Counts the ops of the program."""

    def __init__(self) -> None:
        super().__init__()
        self.num_ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_ops += 1
        return func(*args, **(kwargs or {}))


#: States that change no arithmetic of the models, which are in FP32 on the CPU: what is recorded is the same to the last bit.
STATES: dict[str, State] = {
    **{f"default_{str(dtype)[6:]}": lambda _, dtype=dtype: _default_dtype(dtype) for dtype in DTYPES[1:]},  # type: ignore[misc]
    "default_dtype_changes": lambda step: _default_dtype(DTYPES[step % len(DTYPES)]),
    "default_device_meta": lambda _: _default_device("meta"),
    "device_meta": lambda _: torch.device("meta"),
    "device_cpu": lambda _: torch.device("cpu"),
    "function_mode": lambda _: _Zeroing(),
    "dispatch_mode": lambda _: _Counting(),
    "deterministic": lambda _: _deterministic(),
    "anomaly": lambda _: torch.autograd.set_detect_anomaly(True),
    "grad_mode": lambda _: torch.set_grad_enabled(True),
    "no_multithreading": lambda _: torch.autograd.set_multithreading_enabled(False),
    "saved_tensors_hooks": lambda _: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    "save_on_cpu": lambda _: torch.autograd.graph.save_on_cpu(),
    "saved_tensors_mutable": lambda _: torch.autograd.graph.allow_mutation_on_saved_tensors(),
}


def _recorded(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a run as they compare: NaN equal to itself."""
    rows = rows_of(path)
    assert rows
    return [{name: repr(value) for name, value in row.items()} for row in rows]


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("kind", [None, "blockwise", "tensorwise_delayed", "torchao"])
@pytest.mark.parametrize("name", STATES)
def test_a_state_of_torch_changes_nothing(name: str, kind: str | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _train(kind, tmp_path / "ordinary", lambda _: nullcontext())
    expected = _train(kind, None, STATES[name])
    assert _train(kind, tmp_path / "run", STATES[name]) == expected
    assert "not watched" not in (said := capfd.readouterr().err) and "not recorded" not in said and "stopped" not in said
    assert _recorded(tmp_path / "run") == _recorded(tmp_path / "ordinary")


def test_an_input_that_a_saved_tensors_hook_moved_away_is_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def state(_: int) -> AbstractContextManager[Any]:
        return torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x)

    assert _train("torchao", tmp_path / "run", state) == _train("torchao", None, state)
    said = [line for line in capfd.readouterr().err.splitlines() if "not recorded in full" in line]
    assert len(said) == 1 and "its input in high precision is gone before wgrad" in said[0]
    assert {row["gemm"] for row in rows_of(tmp_path / "run")} == {"fprop", "dgrad", "wgrad"}


@pytest.mark.parametrize("kind", [None, *RECIPES])
def test_fp8_is_the_same_in_every_default_dtype(kind: str | None, tmp_path: Path) -> None:
    expected = _train(kind, tmp_path / "float32", lambda _: nullcontext(), 3)
    for dtype in DTYPES[1:]:
        with _default_dtype(dtype):
            assert _train(kind, tmp_path / str(dtype), lambda _: nullcontext(), 3) == expected
        assert _recorded(tmp_path / str(dtype)) == _recorded(tmp_path / "float32")


@pytest.mark.parametrize("recipe", [None, *RECIPES, "torchao"])
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_a_model_in_the_default_dtype_is_recorded(dtype: torch.dtype, recipe: str | None, tmp_path: Path) -> None:
    def losses(path: Path | None) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64))
        if recipe == "torchao":
            float8 = pytest.importorskip("torchao.float8")
            model = float8.convert_to_float8_training(model, config=float8.Float8LinearConfig(emulate=True))
        elif recipe is not None:
            fp8debug.convert(model, recipe)
        x = torch.randn(64, 64)
        with watched(model, path, every=1) as watch:
            return losses_of(model, lambda _: (model(x) - x).square().mean(), steps=3, lr=1e-2, watch=watch)

    with _default_dtype(dtype):
        assert losses(tmp_path / "run") == losses(None)
    rows = rows_of(tmp_path / "run")
    assert {(row["step"], row["module"]) for row in rows} == {(step, module) for step in range(3) for module in "02"}
    assert {row["gemm"] for row in rows} == {"fprop", "dgrad", "wgrad"}


@pytest.mark.parametrize("kind", [None, "blockwise", "torchao"])
def test_autocast_rounds_no_statistics(kind: str | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def state(_: int) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", dtype=torch.bfloat16)

    assert _train(kind, tmp_path / "run", state) == _train(kind, None, state)
    assert "not watched" not in (said := capfd.readouterr().err) and "not recorded" not in said
    found = [row for row in rows_of(tmp_path / "run") if row["module"] == "0" and row["step"] == 0]
    _train(kind, tmp_path / "ordinary", lambda _: nullcontext(), 1)
    ordinary = [row for row in rows_of(tmp_path / "ordinary") if row["module"] == "0"]
    assert len(found) == len(ordinary)
    if kind is None:  # what is tried are the tensors as they came, in FP32, which autocast's GEMM alone rounds
        fprop = [[row for row in rows if row["gemm"] == "fprop"] for rows in (found, ordinary)]
        for row in (*fprop[0], *fprop[1]):
            row["damage"] = None  # of the gradient that came back
        assert fprop[0] == fprop[1]


@pytest.mark.parametrize("kind", [None, "blockwise", "tensorwise_delayed", "torchao"])
def test_steps_that_end_in_inference_mode_and_evaluations_between_change_nothing(kind: str | None, tmp_path: Path) -> None:
    _train(kind, tmp_path / "ordinary", lambda _: nullcontext())
    model = _net(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with torch.inference_mode():
        watch = fp8debug.watch(model, tmp_path / "run", every=1)
    for step in range(4):
        x = _batch(step)
        loss = (model(x).float() - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.inference_mode():
            model(x)
            watch.step(loss=loss)
    watch.close()
    assert _recorded(tmp_path / "run") == _recorded(tmp_path / "ordinary")


@pytest.mark.parametrize("kind", [None, "blockwise", "torchao"])
def test_a_functional_call_is_recorded_with_the_parameters_that_it_is_given(kind: str | None, tmp_path: Path) -> None:
    def losses(path: Path | None) -> list[float]:
        model, found = _net(kind), []
        given = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        with watched(model, path, every=1) as watch:
            for step in range(3):
                x = _batch(step)
                loss = (torch.func.functional_call(model, given, (x,)) - x).square().mean()
                grads = torch.autograd.grad(loss, list(given.values()))
                with torch.no_grad():
                    for own, grad in zip(given.values(), grads, strict=True):
                        own.add_(grad, alpha=-0.01)
                found.append(loss.item())
                if watch is not None:
                    watch.step(loss=loss)
        return found

    assert losses(tmp_path / "run") == losses(None)
    _train(kind, tmp_path / "ordinary", lambda _: nullcontext(), 3)
    assert _recorded(tmp_path / "run") == _recorded(tmp_path / "ordinary")


def _functional_losses(model: nn.Module, watch: Any, transform: str) -> list[float]:
    """Train by ``torch.func.grad`` of a function of the parameters, per sample under ``vmap``."""
    params = {name: p.detach().clone() for name, p in model.named_parameters()}

    def loss_of(params: dict[str, Tensor], x: Tensor) -> Tensor:
        loss: Tensor = (torch.func.functional_call(model, params, (x,)) - x).square().mean()
        return loss

    found = []
    for step in range(3):
        x = _batch(step)
        if transform == "vmap":
            per_sample = torch.func.vmap(torch.func.grad_and_value(loss_of), in_dims=(None, 0))(params, x)
            grads, loss = {name: grad.mean(0) for name, grad in per_sample[0].items()}, per_sample[1].mean()
        else:
            grads, loss = torch.func.grad_and_value(loss_of)(params, x)
        params = {name: p - 0.01 * grads[name] for name, p in params.items()}
        found.append(loss.item())
        if watch is not None:
            watch.step(loss=loss)
    return found


@pytest.mark.parametrize("transform", ["grad", "vmap"])
@pytest.mark.parametrize("kind", [None, "bf16", "torchao"])
def test_a_transform_of_torch_func_is_left_alone_and_reported(
    kind: str | None, transform: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        expected: Any = _functional_losses(_net(kind), None, transform)
    except Exception as error:  # torchao's own, which a watch does not change
        expected = type(error), str(error)
    capfd.readouterr()
    with fp8debug.watch(model := _net(kind), tmp_path / "run", every=1) as watch:
        try:
            found: Any = _functional_losses(model, watch, transform)
        except Exception as error:
            found = type(error), str(error)
    assert found == expected
    said = [line for line in capfd.readouterr().err.splitlines() if "will record" not in line]
    assert all("a transform of torch.func (grad, vmap, jvp) runs it" in line for line in said) and len(said) in (1, 2)


def _penalized(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the gradients of a loss with a penalty on the gradient of its input."""
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return list(torch.autograd.grad(grad.square().sum(), list(model.parameters()), allow_unused=True))


@pytest.mark.parametrize("kind", [None, "bf16", "torchao"])
def test_a_second_derivative_is_the_same_under_a_watch(kind: str | None, tmp_path: Path) -> None:
    def gradients(path: Path | None) -> Any:
        model = _net(kind)
        with watched(model, path, every=1) as watch:
            try:
                found = [None if grad is None else grad.tolist() for grad in _penalized(model, _batch(0))]
            except Exception as error:  # torchao's own, which a watch does not change
                return str(error)
            if watch is not None:
                watch.step()
        return found

    assert gradients(tmp_path / "run") == gradients(None)


def _transformed(model: nn.Module, x: Tensor) -> object:
    return torch.func.vmap(model)(x[None])


def _batched(model: nn.Module, x: Tensor) -> object:
    x = x.clone().requires_grad_()
    y = model(x)
    return torch.autograd.grad(y, x, torch.ones(2, *y.shape), is_grads_batched=True)


def _forward_mode(model: nn.Module, x: Tensor) -> object:
    with torch.autograd.forward_ad.dual_level():
        return model(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's forward mode
@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize(
    ("ask", "what"),
    [
        (_penalized, "a second derivative (create_graph=True)"),
        (_transformed, "transforms of torch.func (grad, vmap, jvp)"),
        (_batched, "batched gradients (is_grads_batched=True, vectorize=True)"),
        (_forward_mode, "forward-mode differentiation"),
    ],
)
def test_what_an_fp8_linear_cannot_differentiate_is_refused_in_one_line(
    ask: Callable[[nn.Module, Tensor], object], what: str, watched: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = _net("blockwise")
    with fp8debug.watch(model, tmp_path / "run", every=1) if watched else nullcontext():
        with pytest.raises(fp8debug.Fp8DebugError) as refused:
            ask(model, _batch(0))
    text = str(refused.value)
    assert f"an FP8 Linear (blockwise) does not support {what}; run it in high precision" in text and "\n" not in text
    assert "not watched" not in capfd.readouterr().err
    for linear in (model[0], model[2]):  # type: ignore[index]  # a Sequential
        linear.set_recipe("bf16")  # the way out that it names
    ask(model, _batch(0))


def test_batched_gradients_of_a_plain_model_are_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    expected: Any = _batched(_net(None), _batch(0))
    with fp8debug.watch(model := _net(None), tmp_path / "run", every=1) as watch:
        found: Any = _batched(model, _batch(0))
        watch.step()
    assert torch.equal(found[0], expected[0])
    said = capfd.readouterr().err
    assert "its backward pass runs for many gradients at once" in said and "not watched" not in said


def test_a_look_at_the_compiler_takes_no_reference_to_its_callback() -> None:
    """The getter of torch 2.6 gives away a reference that it does not own: a thousand of its calls freed the callback."""

    def callback(*_: Any) -> None: ...

    frames: Any = torch._C._dynamo.eval_frame

    @skipped_by_dynamo
    def references() -> tuple[int, int]:
        frames.set_eval_frame(callback)
        try:
            before = sys.getrefcount(callback)
            for _ in range(8):
                is_under_dynamo()
            return before, sys.getrefcount(callback)
        finally:
            frames.set_eval_frame(None)

    before, after = references()
    assert before == after
