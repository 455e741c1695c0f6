"""tmp"""
from pathlib import Path
def page():
    return (Path(__file__).parents[2]/"docs/glossary.md").read_text()
