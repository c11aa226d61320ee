"""Async tests run under trio, each with a time limit."""

from __future__ import annotations

import inspect

import pytest
import trio


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Runs a test that is a coroutine function under trio; 30 s are far more than any needs."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    async def limited():
        with trio.fail_after(30):
            await pyfuncitem.obj(**arguments)

    trio.run(limited)
    return True
