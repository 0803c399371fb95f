"""Settings of the documentation site; .github/scripts/docs.py gathers the pages and calls Sphinx."""

project = "exl3"
html_title = "exl3"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
html_theme = "furo"
html_show_sphinx = False
html_show_copyright = False
pygments_style = "friendly"
exclude_patterns = ["docs"]
# the front page's toctree is written by docs.py; headings of READMEs may start anywhere
suppress_warnings = ["myst.header"]
