"""Pages of the API reference: one a package, a section a module, written by Sphinx from the docstrings."""

from moeblaze_ref.core.paths import PACKAGE

HOME = "api/index"


def modules() -> dict[str, list[str]]:
    """{package: its modules} by dotted names, in alphabetical order; ``__main__`` is a command and left out."""
    files = sorted(PACKAGE.rglob("*.py"))
    packages: dict[str, list[str]] = {_name(file.parent): [] for file in files if file.name == "__init__.py"}
    for file in files:
        if file.name not in ("__init__.py", "__main__.py"):
            packages[_name(file.parent)].append(_name(file.with_suffix("")))
    return packages


def _name(path):
    return ".".join(path.relative_to(PACKAGE.parent).parts)


def pages() -> dict[str, str]:
    """{file name: reStructuredText} of every package's page, and of one that lists them."""
    packages = modules()
    contents = [*_title("API reference", "="), ".. toctree::", "   :maxdepth: 1", ""]
    contents += [f"   {name}" for name in packages]
    written = {f"api/{name}.rst": _page(name, inside) for name, inside in packages.items()}
    return {f"{HOME}.rst": "\n".join(contents) + "\n"} | written


def _page(package, inside):
    lines = [*_title(package, "="), *_members(package)]
    for module in inside:
        lines += [*_title(module.removeprefix(f"{package}."), "-"), *_members(module)]
    return "\n".join(lines)


def _title(text, rule):
    return [text, rule * len(text), ""]


def _members(module):
    return [f".. automodule:: {module}", "   :members:", ""]
