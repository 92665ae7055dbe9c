"""Tests in a process that has the device; where none can be built, they skip."""

import inspect

import pytest

from tests.accelerator import device
from tests.accelerator.process import Child


@pytest.fixture(scope="session")
def child():
    child = Child()
    yield child
    child.end()


@pytest.fixture(autouse=True)
def buildable():
    if reason := device.why_not():
        pytest.skip(reason)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if hasattr(pyfuncitem.module, "STARTS_PROCESSES"):
        return None
    child = pyfuncitem._request.getfixturevalue("child")
    names = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    child.run(pyfuncitem.module.__name__, pyfuncitem.originalname, arguments)
    return True
