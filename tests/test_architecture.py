"""What holds for the package as a whole: layers, public names, the wheel."""

import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from tests.many import ONE_IN

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "vgrad"

LAYERS = [
    {"torch_private"},
    {"typing", "checks", "devices", "tree", "batches"}
    | {"conditions", "contents", "files", "generators", "overlaps", "ranks", "report"},
    {"functional", "optim"},
    {"factors"},
    {"ops"},
    {"loss"},
    {"precision"},
    {"persample"},
    {"curvature", "dp", "testing"},
    {"ensemble"},
    {"training"},
    {"compiled"},
    {"distributed"},
    {"attribution", "integrations"},
    {"cli"},
    {"__main__"},
]
"""Nobody imports from a layer above their own, not even inside a function."""


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts != ("__init__",):
            yield parts, path


def imports(path):
    """Yield the names that a file imports, with their modules."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported(path):
    """Return the first name below `vgrad` that each import of a file reaches."""
    return {n.split(".")[1] for n in imports(path) if n.startswith("vgrad.")}


def layer(name):
    return next(number for number, names in enumerate(LAYERS) if name in names)


def test_every_module_has_a_layer_and_imports_go_one_way():
    wrong = [
        f"{'.'.join(parts)} imports {name}"
        for parts, path in modules()
        for name in imported(path)
        if layer(name) > layer(parts[0])
    ]
    assert not wrong


def test_no_file_imports_one_that_imports_it():
    """Not even inside a function, for a type alone, or by way of other files."""
    files = {
        ".".join(("vgrad", *parts)).removesuffix(".__init__"): path
        for parts, path in modules()
    }
    files["vgrad"] = PACKAGE / "__init__.py"
    reached = {}
    for name, path in files.items():
        taken = {x if x in files else x.rpartition(".")[0] for x in imports(path)}
        reached[name] = taken & files.keys() - {name}
    for _ in files:  # until no file reaches more
        more = {n: own.union(*(reached[x] for x in own)) for n, own in reached.items()}
        if more == reached:
            break
        reached = more
    assert not [name for name, others in reached.items() if name in others]


def test_the_command_needs_the_standard_library_alone_until_it_runs():
    """One import of the package, inside a function; only `cli` imports the command."""
    names = imports(ROOT / "vgrad_command.py")
    foreign = [n for n in names if n.split(".")[0] not in sys.stdlib_module_names]
    assert foreign == ["vgrad.cli.commands.run"]
    assert all(
        parts[0] in ("cli", "__main__")
        for parts, path in modules()
        if "vgrad_command" in path.read_text()
    )


def test_optim_needs_the_ground_floor_only():
    for path in (PACKAGE / "optim").rglob("*.py"):
        assert imported(path) <= LAYERS[0] | LAYERS[1] | {"optim"}


def test_the_engine_imports_none_of_the_quantities():
    for path in (PACKAGE / "persample" / "engine").glob("*.py"):
        for name in imports(path):
            _, *parts = name.split(".")
            assert parts[:1] != ["persample"] or parts[1] == "engine", path


OWN = {"_replace", "_fields", "_asdict", "_make"}  # of named tuples, which document it


def private(path):
    """Yield the names beginning with an underscore that a file takes from torch."""
    for name in imports(path):
        if name.startswith("torch."):
            yield from (part for part in name.split(".") if part.startswith("_"))
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in PRIVATE_OF_TORCH - OWN:
            owner = getattr(node.value, "id", None)
            if owner not in ("self", "cls"):
                yield node.attr


PRIVATE_OF_TORCH = {
    name
    for owner in (torch, torch.Tensor, torch.nn.Module(), torch.ops.aten, torch.Size)
    for name in dir(owner)
    if name.startswith("_") and not name.startswith("__")
} | {"_schema", "_cdata", "_current_level", "_fused_sgd_", "_unsafe_view"}


def test_torch_private_is_the_only_door_to_what_torch_does_not_promise():
    for parts, path in modules():
        if parts[0] != "torch_private" and parts != ("tree",):
            assert not list(private(path)), path


NAMES_DEVICES = {
    "precision/autocasting.py": "torch's lists of what autocast casts",
    "compiled/guards.py": "torch's switches of rounding",
    "factors/products.py": "torch's switches of rounding",
    "persample/engine/proxies.py": "methods of tensors",
}


def test_devices_are_asked_for_what_they_can_do_and_not_for_their_names():
    """The command alone has a list of devices that it was written for."""
    name = re.compile(r"""is_cuda|["'](cuda|xpu|mps)\b|torch\.(cuda|xpu|mps)\.""")
    for parts, path in modules():
        place = "/".join(parts) + ".py"
        if parts[0] not in ("cli", "torch_private") and place not in NAMES_DEVICES:
            assert not name.search(path.read_text()), path


def test_tests_come_in_through_the_doors():
    """What they import is a room or lies on the ground floor: moves break no test."""
    rooms = {
        ".".join(("vgrad", *parts[:-1]))
        for parts, _ in modules()
        if parts[-1] == "__init__"
    }
    rooms |= {"vgrad", *(f"vgrad.{name}" for name in LAYERS[1])}
    rooms |= {"vgrad.testing", "vgrad.__main__", "vgrad.integrations.transformers"}
    for path in sorted(ROOT.glob("tests/**/*.py")):
        for name in imports(path):
            module = name.rpartition(".")[0] or name
            assert module.split(".")[0] != "vgrad" or module in rooms, (path, name)


def test_no_test_keeps_the_profile_from_drawing_more_examples():
    """They are counted by `examples`, which multiplies where the profile says so."""
    for path in ROOT.glob("tests/**/test_*.py"):
        assert "hypothesis.settings" not in imports(path), path


def test_tests_of_many_cases_are_there():
    for file, tests in ONE_IN.items():
        text = (ROOT / "tests" / file).read_text()
        assert all(f"\ndef {name}(" in text for name in tests), file


def test_importing_the_package_loads_nothing_heavy_and_changes_nothing():
    code = (
        "import random, sys, torch, warnings\n"
        "before = (torch.get_rng_state(), torch.is_grad_enabled(), "
        "list(warnings.filters), torch.get_default_dtype())\n"
        "import vgrad\n"
        "assert torch.equal(before[0], torch.get_rng_state())\n"
        "assert before[1:] == (torch.is_grad_enabled(), list(warnings.filters), "
        "torch.get_default_dtype())\n"
        "heavy = {'dp_accounting', 'matplotlib', 'rich', 'sklearn', 'absl'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.more
@pytest.mark.slow
def test_the_wheel_holds_the_package_and_the_command_alone(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    inside = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    expected = {str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*.py")}
    assert inside == {*expected, "vgrad/py.typed", "vgrad_command.py"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.more
@pytest.mark.slow
def test_the_wheel_works_where_the_checkout_is_not(wheel, tmp_path):
    target = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(target)
    code = "import vgrad, torch; print(vgrad.__file__); import vgrad.__main__"
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(target), "PATH": ""},
    )
    assert done.stdout.startswith(str(target))
