"""The site: the documents, the notebooks and an API reference from the docstrings, made by Sphinx.

``python -m moeblaze_ref.course.site.build`` writes it to build/site. Imported by that command and by docs/conf.py
alone: it needs Sphinx, which the rest of the project does not.
"""
