"""Displays for the notebooks: source code, tables, pictures and sliders.

Imported by notebooks alone: it needs IPython and ipywidgets, which the rest of the project does not.
"""

from IPython.display import Markdown

from moeblaze_ref.core.on_demand import import_on_demand
from moeblaze_ref.course.notebook.controls import doubling, explore, play, progress, track
from moeblaze_ref.course.notebook.markdown import bullets, table
from moeblaze_ref.course.notebook.pictures import layer_picture, prepare_pictures
from moeblaze_ref.course.notebook.sources import show_kernel, show_source

__all__ = [
    "Markdown",
    "bullets",
    "doubling",
    "explore",
    "layer_picture",
    "play",
    "progress",
    "show_kernel",
    "show_source",
    "table",
    "track",
]

prepare_pictures()

import_on_demand(__name__)
