"""Material for lecturers beside the notebooks: the exercises in nbgrader's format, slides, and a quiz."""
