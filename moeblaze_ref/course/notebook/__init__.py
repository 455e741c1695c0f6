"""Displays for the notebooks: source code, tables, pictures and sliders.

Imported by notebooks alone: it needs IPython and ipywidgets, which the rest of the project does not.
"""

from moeblaze_ref.course.notebook.controls import doubling, explore, play, progress, track
from moeblaze_ref.course.notebook.markdown import bullets, table
from moeblaze_ref.course.notebook.pictures import prepare_pictures
from moeblaze_ref.course.notebook.sources import show_kernel, show_source

__all__ = ["bullets", "doubling", "explore", "play", "progress", "show_kernel", "show_source", "table", "track"]

prepare_pictures()
