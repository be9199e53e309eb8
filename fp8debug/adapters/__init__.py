"""Entry of recording into a model: ``watch()`` and one adapter file per backend, the first that matches a module takes it."""

from fp8debug.adapters import grouped, native, plain, scaled_mm, torchao, transformer_engine
from fp8debug.adapters.watching.attach import Watch, watch

__all__ = ["Watch", "grouped", "native", "plain", "scaled_mm", "torchao", "transformer_engine", "watch"]
