"""Naming conventions of quantized checkpoints; importing the package registers them, one file each."""

from importlib import import_module

from fp8debug.checkpoints.layouts.base import LAYOUTS, Layout, Weight

# The order matters: a layout that is told by more of a tensor's parts comes before one that is told by fewer.
for _file in ("torchao", "transformer_engine", "nvfp4", "mx", "deepseek", "compressed_tensors"):
    import_module(f"{__name__}.{_file}")

__all__ = ["LAYOUTS", "Layout", "Weight"]
