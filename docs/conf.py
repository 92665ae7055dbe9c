"""The site: pages, tutorials with their figures, benchmarks, and what docstrings say.

`make docs` builds it in `build/docs`. Sphinx reads `build/docs/source`, which
`site/sources.py` lays out: the pages of this folder, whose links work on GitHub too,
the tutorials, and what was measured (`bench/results`).
"""

import sys
from importlib.metadata import version as version_of
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "site")]

import gallery  # noqa: E402
import linking  # noqa: E402
import reference  # noqa: E402
import sources  # noqa: E402

project = "vgrad"
author = "the authors of vgrad"
copyright = "the authors of vgrad, Apache-2.0"
version = release = version_of("vgrad")

extensions = [
    "myst_parser",
    "pydata_sphinx_theme",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_gallery.gen_gallery",
]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
nitpicky = True
# Signatures name types that have no page: torch's, Python's and what transforms return.
nitpick_ignore_regex = [("py:class", ".*"), ("py:obj", r"typing\..*")]

default_role = "literal"
smartquotes_action = "D"  # quotes are code, or as they were written
add_module_names = False
toc_object_entries_show_parents = "hide"
maximum_signature_line_length = 80
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = False
napoleon_custom_sections = ["Reference", ("Attributes", "params_style")]
myst_heading_anchors = 3
suppress_warnings = ["config.cache"]  # the gallery's settings hold functions

sphinx_gallery_conf = {
    "examples_dirs": "../tutorials",
    "gallery_dirs": "tutorials",
    "filename_pattern": r".*\.py",
    "within_subsection_order": "FileNameSortKey",
    "reset_modules": ("matplotlib", gallery.fresh),
    "capture_repr": (),
    "parallel": 2,
    "backreferences_dir": "tutorials/uses",
    "doc_module": ("vgrad",),
    "log_level": {"backreference_missing": "debug"},
    "notebook_extensions": set(),
    "download_all_examples": False,
    "show_signature": False,
    "write_computation_times": False,
    "image_srcset": ["2x"],
}

html_theme = "pydata_sphinx_theme"
html_title = f"vgrad {version}"
html_static_path = ["static"]
html_css_files = ["site.css"]
templates_path = ["templates"]
html_context = {"default_mode": "auto"}
html_show_sourcelink = False
html_sidebars = {"**": ["everything.html"]}
html_theme_options = {
    "logo": {"text": "vgrad"},
    "navbar_center": [],
    "navbar_persistent": [],
    "navbar_end": ["search-field.html", "theme-switcher"],
    "show_nav_level": 1,
    "show_toc_level": 2,
    "footer_start": ["copyright"],
    "footer_end": ["sphinx-version", "theme-version"],
}


def lay_out(app, config):
    """Write what Sphinx reads, before the gallery asks for it."""
    sources.lay_out(ROOT, Path(app.srcdir).parent)
    reference.write(Path(app.srcdir) / "reference")


def setup(app):
    """Add the parts of `site/`."""
    app.connect("config-inited", lay_out, priority=1)
    gallery.setup(app)
    linking.setup(app)
    reference.setup(app)
