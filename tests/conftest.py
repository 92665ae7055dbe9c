"""The same random numbers in every test on every run, and another run on purpose."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.many import in_more

ROOT = Path(__file__).parent.parent


class Generator:
    """Torch's global generator, for hypothesis to seed before every example."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


try:
    from hypothesis import HealthCheck, register_random, settings
    from hypothesis.internal.conjecture import providers
except (
    ModuleNotFoundError
):  # tests of a GPU run where torch and pytest are all there is
    pass
else:
    # How long an example takes says how busy the machine is.
    untimed = settings(
        deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.register_profile(
        "fixed", untimed, max_examples=100, derandomize=True, database=None
    )
    # `make test-random`
    settings.register_profile("random", untimed, max_examples=1000)
    settings.load_profile("fixed")
    register_random(Generator)
    # Hypothesis also draws numbers that it finds in the modules loaded so far, which
    # differ with the tests selected: a failure would not come again when its test runs
    # alone.
    pytest.MonkeyPatch().setattr(providers, "_get_local_constants", providers.Constants)

# Ops of tests are so small that a second thread only makes them wait for it. What
# depends on threads sets their number itself.
torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if in_more(item.nodeid):
            item.add_marker(pytest.mark.more)


@pytest.fixture(autouse=True)
def seeded():
    """Let no test depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """Build the wheel, which takes seconds."""
    out = tmp_path_factory.mktemp("wheel")
    source = out / "source"
    # A copy of what is under version control's eye, so that no build folder is left.
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "vgrad_command.py"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    for folder in ("vgrad", "tests", "bench", "tutorials"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".typed"):
                target = source / path.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", out, source],
        check=True,
        capture_output=True,
    )
    (built,) = out.glob("*.whl")
    return built
