"""What holds for the package as a whole: layers, public names, the wheel."""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import vgrad

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "vgrad"

LAYERS = [
    {"torch_private"},
    {"typing", "checks", "tree", "names", "dtypes", "batches", "sensitivity"}
    | {"files", "generators", "process", "randomness"},
    {"functional", "optim"},
    {"lowering", "precision"},
    {"persample"},
    {"dp", "testing"},
    {"ensemble"},
    {"training"},
    {"cli"},
    {"__main__"},
]
"""Nobody imports from a layer above their own, not even inside a function."""

PERSAMPLE = [{"factors"}, {"rules"}, {"engine"}]


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts != ("__init__",):
            yield parts, path


def imported(path):
    """Yield the first name below `vgrad` that each import of a file reaches."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.startswith("vgrad."):
                yield name.split(".")[1]


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


def test_optim_needs_the_ground_floor_only():
    for path in (PACKAGE / "optim").rglob("*.py"):
        assert set(imported(path)) <= {"typing", "checks", "tree", "names", "optim"}


def test_no_module_outgrows_one_idea():
    long = {
        path.name: len(path.read_text().splitlines())
        for _, path in modules()
        if len(path.read_text().splitlines()) > 371
    }
    assert not long


def test_no_test_keeps_the_profile_from_drawing_more_examples():
    """They are counted by `examples`, which multiplies where the profile says so."""
    own = [
        f"{path.name}: settings"
        for path in sorted(ROOT.glob("tests/**/test_*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "hypothesis"
        if "settings" in [alias.name for alias in node.names]
    ]
    assert not own


def test_the_public_names_are_exported_once():
    source = (PACKAGE / "__init__.py").read_text()
    names = [
        alias.asname
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    assert len(names) == len(set(names))
    assert all(hasattr(vgrad, name) for name in names)


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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    source = out / "source"
    # A copy of what is under version control's eye, so that no build folder is left.
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    for folder in ("vgrad", "tests", "bench", "tutorials"):
        for path in (ROOT / folder).rglob("*.py"):
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


def test_the_wheel_holds_the_package_alone(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    inside = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    expected = {str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*.py")}
    assert inside == expected
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_works_where_the_checkout_is_not(wheel, tmp_path):
    target = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(target)
    code = "import vgrad, torch; print(vgrad.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(target), "PATH": ""},
    )
    assert done.stdout.startswith(str(target))
