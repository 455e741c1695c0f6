"""Pages of the API reference: one a package, a section a module, written by Sphinx from the docstrings."""

import pkgutil

import moeblaze_ref

HOME = "api/index"


def modules() -> dict[str, list[str]]:
    """{package: its modules} by dotted names, in alphabetical order."""
    found = {moeblaze_ref.__name__: []}
    for module in pkgutil.walk_packages(moeblaze_ref.__path__, f"{moeblaze_ref.__name__}."):
        if module.ispkg:
            found[module.name] = []
        else:
            found[module.name.rpartition(".")[0]].append(module.name)
    return dict(sorted(found.items()))


def pages() -> dict[str, str]:
    """{file name: reStructuredText} of every package's page, and of one that lists them."""
    packages = modules()
    contents = [*_title("API reference", "="), ".. toctree::", "   :maxdepth: 1", "", *(f"   {name}" for name in packages)]
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
