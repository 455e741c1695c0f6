"""The site is built without a warning, and none of its links leads nowhere."""

import functools
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(the finished command, the folder of the site); apart, since Sphinx leaves a process changed."""
    site = tmp_path_factory.mktemp("site") / "site"
    command = [sys.executable, "-m", "moeblaze_ref.site.build", site]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True), site


class Page(HTMLParser):
    """An HTML file: where its links lead, where a link may lead in it, its pictures, its scripts and styles."""

    def __init__(self, path):
        super().__init__()
        self.links, self.anchors, self.pictures, self.loaded = [], set(), [], []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag == "img":
            self.pictures.append(found)
        if tag in ("img", "link", "script"):
            self.loaded += [found[name] for name in ("src", "href") if name in found]


page = functools.cache(Page)


def broken(site: Path) -> Iterator[str]:
    """Links of the pages under a folder that lead to no file, or to no place in one."""
    for path in site.rglob("*.html"):
        for target in page(path).links:
            link = urlsplit(target)
            if link.scheme or link.netloc:
                continue  # another site's business
            file = Path(path.parent, unquote(link.path)).resolve() if link.path else path
            if not file.is_file():
                yield f"{path.relative_to(site)}: {target}: there is no such file"
            elif link.fragment and unquote(link.fragment) not in page(file).anchors:
                yield f"{path.relative_to(site)}: {target}: there is no such place"


def test_it_is_built_without_a_warning(built):
    command, site = built
    assert command.returncode == 0 and not command.stderr, command.stderr
    assert (site / "index.html").is_file() and (site / "searchindex.js").is_file()


def test_no_link_is_broken(built):
    assert list(broken(built[1])) == []


def test_a_broken_link_is_found(tmp_path):
    (tmp_path / "one.html").write_text('<p id="here"><a href="#here"><a href="two.html"><a href="https://a.invalid/b">')
    (tmp_path / "three.html").write_text('<a href="one.html#there"><a href="one.html#here">')
    assert sorted(broken(tmp_path)) == [
        "one.html: two.html: there is no such file",
        "three.html: one.html#there: there is no such place",
    ]
