"""The editor of the kernel exercises in JupyterLab: Run, Stop, Step, and messages on their lines.

`widget` is the part in the kernel; ``editor.js`` is the part in the page, from which ``make editor`` builds
``bundle.js`` with CodeMirror inside.
"""

from moeblaze_ref.course.editor.widget import KernelEditor

__all__ = ["KernelEditor"]
