"""Marks of the test modules whose models torch.compile compiles."""

from __future__ import annotations

import pytest

#: Dynamo makes an object of a user's autograd function and reads the gradient of an intermediate tensor; inductor uses what
#: torch deprecates.
COMPILES = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.usefixtures("fresh_dynamo"),
]
