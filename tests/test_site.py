"""The site: built without a warning, with every tutorial run."""

import html
import inspect
import os
import re
import subprocess
import sys
import zlib
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote

import pytest

import vgrad.cli
from tests.test_public import ROOMS

ROOT = Path(__file__).parent.parent
TUTORIALS = sorted(path.stem for path in (ROOT / "tutorials").glob("*.py"))

COLUMNS = 92
"""Characters of code beside each other in a window of 1300 pixels."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build it from nothing, so that every tutorial runs."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "source").mkdir()
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-j", "2"]
    command += ["-c", ROOT / "docs", folder / "source", folder / "html"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-10000:]
    return folder / "html"


def entries(site):
    """Yield the Python names of the inventory, which other sites link to."""
    found = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    for line in zlib.decompress(found).decode().splitlines():
        name, role, *_ = line.split()
        if role.startswith("py:"):
            yield name


@pytest.mark.more
@pytest.mark.slow
@pytest.mark.skipif(not find_spec("sphinx_gallery"), reason="needs the extra `docs`")
def test_the_site(site, subtests):
    """One test, since the parts share what takes a minute to build."""
    made = [path for path in site.rglob("*.html") if "_static" not in path.parts]
    pages = {path.resolve(): path.read_text() for path in made}

    with subtests.test("every tutorial has run"):
        for name in TUTORIALS:
            page = pages[site / "tutorials" / f"{name}.html"]
            assert "sphx-glr-script-out" in page, name

    with subtests.test("every public name has an entry"):
        names = set(entries(site))
        for room in {*ROOMS} - {vgrad.cli, vgrad.persample}:
            for name in room.__all__:
                shown = f"{room.__name__}.{name}" in names
                assert shown or inspect.ismodule(getattr(room, name)), (room, name)

    with subtests.test("what is linked is there"):
        marks = {path: set(re.findall(r'id="([^"]+)"', pages[path])) for path in pages}
        for path, text in pages.items():
            for link in set(re.findall(r'(?:src|href)="([^"]+)"', text)):
                name, _, mark = unquote(link).partition("#")
                there = (path.parent / name.split("?")[0]).resolve() if name else path
                if not re.match(r"https?:|data:", link):
                    assert there.exists(), (path, link)
                    # The way back from a file knows one package of those that share it.
                    if mark and "_modules" not in path.parts:
                        assert mark in marks[there], (path, link)

    with subtests.test("nothing is loaded from elsewhere"):
        tags = r'<(?:script|link|img|iframe)[^>]*(?:src|href)="(?:https?:)?//[^>]*'
        assert not re.findall(tags, "".join(pages.values()))

    front = pages[site / "index.html"]
    with subtests.test("the front page says what vgrad is, and leads to the others"):
        _, _, article = front.partition("<article")
        headline, install, example, picture = (
            article.find(each)
            for each in (
                "<strong>Per-sample gradients, private training and ensembles",
                "pip install",
                '<span class="n">per_sample_norm</span>',
                "one_backward_pass.svg",
            )
        )
        assert 0 < headline < install < article.find('href="start.html"') < example
        assert example < picture
        assert article.count('<span class="n">per_sample_norm</span>') == 1
        sidebar = front[front.index('<nav class="bd-docs-nav') :]
        assert re.search(r'href="(\w+\.html)"', sidebar)[1] == "start.html"
        for page in ("tutorials/index", "reference/index", "benchmarks/index"):
            assert f'href="{page}.html"' in sidebar[: sidebar.index("</nav>")]

    with subtests.test("code fits"):
        for path in pages:
            if "_modules" not in path.parts and "tutorials" not in path.parts:
                for code in re.findall(r"<pre>(.*?)</pre>", pages[path], re.DOTALL):
                    lines = html.unescape(re.sub(r"<[^>]*>", "", code)).splitlines()
                    assert max(map(len, lines), default=0) <= COLUMNS, path
