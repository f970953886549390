"""Fixtures for tests that need several hosts."""

import functools

import pytest

from benchmarks import hosts


@functools.cache
def _why_unavailable() -> str:
    return hosts.why_unavailable()


@pytest.fixture(autouse=True)
def hosts_are_permitted() -> None:
    """Skips, with the reason, where this machine does not let us make network namespaces."""
    if reason := _why_unavailable():
        pytest.skip(reason)
