"""Sphinx configuration; `make docs` runs it through moeblaze_ref.course.site.build.

Why Sphinx and MyST-NB: the notebooks, the documents and the docstrings stay the files that they are. MyST reads the
Markdown that GitHub shows, MyST-NB the notebooks with the outputs that are committed, and autodoc the docstrings of the
imported modules, so that a signature cannot differ from the code's. Links among all three are resolved by one program,
whose warnings are errors. Napoleon, a part of Sphinx, reads numpydoc's sections.
"""

from moeblaze_ref.course.site import sources

project = "moeblaze_ref"
author = "The moeblaze_ref contributors"
html_title = "moeblaze_ref"
root_doc = "docs/index"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.linkcode",
    "moeblaze_ref.course.site.extension",
    "moeblaze_ref.course.site.mathml",
]
linkcode_resolve = sources.linkcode_resolve

# Notebooks are shown with the outputs that are committed; `make notebooks` makes those.
nb_execution_mode = "off"
nb_render_markdown_format = "myst"  # outputs hold tables
myst_enable_extensions = ["colon_fence", "dollarmath"]
html_math_renderer = "mathml"
myst_heading_anchors = 4  # by GitHub's rule, which the links in the documents follow

autodoc_member_order = "bysource"
autodoc_use_type_comments = False
autodoc_mock_imports = ["cupy", "triton"]
napoleon_google_docstring = False
napoleon_use_rtype = napoleon_use_param = False  # types are words here, such as "ndarray (L, d)"
napoleon_custom_sections = [("Attributes", "params_style")]
default_role = "literal"  # `name` in a docstring is code, as in Markdown

# No font, script or style from another site: the pages work from a disk.
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["controls.js", "frames.js", "routing.js"]
html_copy_source = False
html_show_sphinx = html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}
