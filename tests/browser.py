"""The Chromium of the machine, without a window: what a reader sees of JupyterLab and of the site."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Locator, Page, TimeoutError, expect, sync_playwright

ROOT = Path(__file__).parents[1]
NAMES = ("chromium", "chromium-browser", "google-chrome")
MISSING = (
    f"the tests open JupyterLab and the site in a browser, and Chromium is missing: no {', '.join(NAMES)} on the PATH. "
    "On Debian: sudo apt install chromium; on Ubuntu: chromium-browser"
)
QUIET = ("no-first-run", "disable-background-networking", "disable-component-update", "disable-sync", "disable-quic")
FLAGS = tuple(f"--{name}" for name in ("no-sandbox", "disable-gpu", *QUIET))
HANGS = 300_000  # milliseconds after which nothing more is expected, on a slow and busy machine


def chromium() -> str:
    """The path of the machine's browser.

    Raises
    ------
    FileNotFoundError
        If there is none.
    """
    for path in filter(None, map(shutil.which, NAMES)):
        return path
    raise FileNotFoundError(MISSING)


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Page]:
    """A page of a browser of its own. What fails inside names a screenshot in the folder."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=FLAGS)
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.set_default_timeout(HANGS)
        page.set_default_navigation_timeout(HANGS)
        try:
            yield page
        except BaseException as error:
            page.screenshot(path=folder / "failed.png")
            error.add_note(f"what the browser showed: {folder / 'failed.png'}")
            raise
        finally:
            browser.close()


# JupyterLab ----------------------------------------------------------------------------------------------------------

TOKEN = "reader"
FAULTS = ", ".join(f'[data-mime-type="application/vnd.jupyter.{name}"]' for name in ("error", "stderr"))
PICTURES = ".jp-OutputArea-output img"
RAN = """() => {
    const prompts = [...document.querySelectorAll(".jp-CodeCell .jp-InputPrompt")].map(prompt => prompt.textContent);
    return prompts.some(text => /\\d/.test(text)) && !prompts.some(text => text.includes("*"));
}"""

REDRAWN = """([explorer, pictures, before]) => {
    const picture = explorer.querySelector(pictures);
    return picture !== null && picture.src !== before && picture.naturalWidth > 0;
}"""


@contextlib.contextmanager
def jupyterlab(folder: Path) -> Iterator[str]:
    """The address of a JupyterLab over a folder, with this very Python as its kernel and nothing of the user's."""
    home = folder / ".home"
    _write_settings(home)
    places = {f"JUPYTER_{name}_DIR": str(home / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    places |= {f"JUPYTERLAB_{name}_DIR": str(home / name.lower()) for name in ("SETTINGS", "WORKSPACES")}
    others = {name: value for name, value in os.environ.items() if not name.startswith("JUPYTER")}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--port=0"]
    command += [f"--ServerApp.root_dir={folder}", f"--IdentityProvider.token={TOKEN}"]
    log = home / "log"
    with open(log, "w") as said:
        env = {**others, **places, "IPYTHONDIR": str(home / "ipython"), "PYTHONPATH": str(ROOT)}
        server = subprocess.Popen(command, env=env, stdout=said, stderr=subprocess.STDOUT)
    try:
        yield _address(server, log)
    finally:
        server.terminate()
        server.wait()


def _write_settings(home):
    """No question about news when JupyterLab is opened."""
    page = home / "config" / "labconfig" / "page_config.json"
    page.parent.mkdir(parents=True)
    page.write_text(json.dumps({"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}))


def _address(server, log):
    """Where the server says that it listens."""
    for _ in range(HANGS // 100):
        if found := re.search(r"http://127\.0\.0\.1:\d+/lab(?=\?)", log.read_text()):
            return found[0]
        if server.poll() is not None:
            break
        time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not start:\n{log.read_text()}")


def run_all(page: Page, lab: str, name: str) -> None:
    """Open a notebook and run all of its cells, as a reader does: by the menu, once the kernel is there."""
    page.goto(f"{lab}/tree/{name}?token={TOKEN}")
    idle = page.locator("#jp-main-statusbar").get_by_text("| Idle")
    idle.wait_for()
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_text("Run All Cells", exact=True).click()
    page.wait_for_function(RAN)
    idle.wait_for()


def check_outputs(page: Page, cells: int, pictures: int) -> None:
    """Every one of so many code cells has run, without an error or a warning, and so many pictures are there.

    Raises
    ------
    AssertionError
    """
    faults = page.locator(FAULTS).all_text_contents()
    assert not faults, "\n".join(faults)
    prompts = page.locator(".jp-CodeCell .jp-InputPrompt").all_text_contents()
    assert prompts == [f"[{number}]:" for number in range(1, cells + 1)], prompts
    expect(page.locator(PICTURES)).to_have_count(pictures, timeout=HANGS)


def move_slider(explorer: Locator, hangs: int = HANGS) -> None:
    """Move the first slider of an ``explore`` by a key, and wait until its picture is another one.

    Raises
    ------
    AssertionError
        If the picture is the same after so many milliseconds.
    """
    before = explorer.locator(PICTURES).get_attribute("src")
    handle = explorer.locator(".noUi-handle").first
    now, last = (handle.get_attribute(f"aria-value{name}") for name in ("now", "max"))
    handle.press("ArrowLeft" if now == last else "ArrowRight")
    try:
        explorer.page.wait_for_function(REDRAWN, arg=[explorer.element_handle(), PICTURES, before], timeout=hangs)
    except TimeoutError:
        moved = explorer.locator(".widget-label").first.text_content()
        raise AssertionError(f"no other picture after the slider {moved!r} was moved") from None
