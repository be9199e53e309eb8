"""Run by every Python process that finds this folder first on its path; see ``fp8debug.startup``."""

import os

if os.environ.get("FP8DEBUG"):
    from fp8debug.startup import start

    start()


def _run_next() -> None:
    """Run the sitecustomize that this one stands before."""
    import sys
    from importlib.machinery import PathFinder

    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  # pathlib is not loaded for it
    others = [folder for folder in sys.path if os.path.abspath(folder) != here]  # noqa: PTH100  # as above
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.origin is not None:
        with open(spec.origin, encoding="utf-8") as file:  # noqa: PTH123  # as above
            exec(compile(file.read(), spec.origin, "exec"), {"__name__": "sitecustomize", "__file__": spec.origin})


_run_next()
