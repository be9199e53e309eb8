"""Fixtures of the tests of compiled code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Compile anew, and count from 0; what a test compiled is gone after it."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()
