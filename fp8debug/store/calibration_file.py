"""The file of static scales that ``fp8debug calibrate`` writes and ``convert`` reads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8debug.errors import UsageError
from fp8debug.recipes import Recipe
from fp8debug.store.file_checks import read_json

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

KIND, SCHEMA = "fp8debug-scales", 1


def load_recipes(path: str | Path) -> dict[str, Recipe]:
    """Return the recipe of each module in a file of ``fp8debug calibrate``.

    Raises:
        UsageError: the file is missing or none of ours.
    """
    try:
        document = read_json(Path(path))
        if document["kind"] != KIND or document["schema"] > SCHEMA:
            raise UsageError(f"{path} has kind {document['kind']!r}, schema {document['schema']}: not scales that we can read")
        return {str(module): Recipe.from_dict(recipe) for module, recipe in document["recipes"].items()}
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; make it with `fp8debug calibrate RUN -o {path}`") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is not a file of `fp8debug calibrate`: {type(error).__name__} {error}"[:300]) from None
