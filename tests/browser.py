"""The Chromium of the machine, without a window: what a reader sees of JupyterLab and of the site."""

import ast
import contextlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import processes
from jupyter_client import BlockingKernelClient
from playwright.sync_api import Locator, Page, expect, sync_playwright

ROOT = Path(__file__).parents[1]
NAMES = ("chromium", "chromium-browser", "google-chrome")
MISSING = (
    f"the tests open JupyterLab and the site in a browser, and Chromium is missing: no {', '.join(NAMES)} on the PATH. "
    "On Debian: sudo apt install chromium; on Ubuntu: chromium-browser"
)
QUIET = ("no-first-run", "disable-background-networking", "disable-component-update", "disable-sync", "disable-quic")
FLAGS = tuple(f"--{name}" for name in ("no-sandbox", "disable-gpu", *QUIET))
HANGS = 300_000  # milliseconds after which nothing more is expected, on a slow and busy machine
expect.set_options(timeout=HANGS)
POLLS = 250  # milliseconds between two looks: more would take the processor from what is waited for


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

# What JupyterLab or the site breaks or cuts: lines of shown source, cells that are too wide, tables that do not scroll.
CUT = """() => [
    ...[...document.querySelectorAll(".jp-OutputArea-output.jp-RenderedMarkdown pre code")].filter(
        shown => getComputedStyle(shown).whiteSpace !== "pre"),
    ...[...document.querySelectorAll(".jp-CodeCell .cm-scroller, .cell_input pre")].filter(
        cell => cell.scrollWidth > cell.clientWidth),
    ...[...document.querySelectorAll(".jp-RenderedMarkdown table, article table")].filter(table => {
        const holder = table.closest(".jp-RenderedMarkdown, .table-wrapper, .highlight");
        return !(holder && getComputedStyle(holder).overflowX === "auto") && table.scrollWidth > table.closest(
            ".jp-RenderedMarkdown, article").clientWidth;
    }),
].map(found => found.textContent)"""
IS_LAST = """slider => slider.type === "range" ? slider.value === slider.max
    : slider.getAttribute("aria-valuenow") === slider.getAttribute("aria-valuemax")"""

# What a reader sees of an ``explore``: the texts of its controls in their order, its picture with its text in words, or
# its message.
SEEN = """explorer => ({
    controls: [...explorer.querySelectorAll(".widget-readout, select, .jupyter-button")].map(control =>
        control.selectedOptions?.[0].textContent.replaceAll("\u00a0", " ") ?? control.textContent),
    picture: explorer.querySelector(".jp-OutputArea-output img")?.src.replace("data:image/png;base64,", "") ?? null,
    alt: explorer.querySelector(".jp-OutputArea-output img")?.alt ?? null,
    message: explorer.querySelector(".jp-RenderedMarkdown")?.textContent.trim() ?? null,
})"""
# The same as the kernel has it, drawn anew for the values that its controls have.
STATES = Path(__file__).with_name("explorer_states.py")


@contextlib.contextmanager
def jupyterlab(folder: Path) -> Iterator[str]:
    """The address of a JupyterLab over a folder, with this very Python as its kernel and nothing of the user's."""
    home = folder / ".home"
    settings = home / "config" / "labconfig" / "page_config.json"
    settings.parent.mkdir(parents=True)  # no question about news when JupyterLab is opened
    settings.write_text(json.dumps({"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}))
    places = {f"JUPYTER_{name}_DIR": str(home / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    places |= {f"JUPYTERLAB_{name}_DIR": str(home / name.lower()) for name in ("SETTINGS", "WORKSPACES")}
    others = {name: value for name, value in os.environ.items() if not name.startswith("JUPYTER")}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--port=0"]
    command += [f"--ServerApp.root_dir={folder}", f"--IdentityProvider.token={TOKEN}"]
    log = home / "log"
    with open(log, "w") as said:
        startup = home / "ipython" / "profile_default" / "startup"
        startup.mkdir(parents=True)
        shutil.copy(STATES, startup)
        env = {**others, **places, "IPYTHONDIR": str(home / "ipython"), "PYTHONPATH": str(ROOT)}
        server = subprocess.Popen(command, env=env, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield _address(server, log)
    finally:
        processes.end(server)


def _address(server, log):
    """Where the server says that it listens."""
    for _ in range(HANGS // 100):
        if found := re.search(r"http://127\.0\.0\.1:\d+/lab(?=\?)", log.read_text()):
            return found[0]
        if server.poll() is not None:
            break
        time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not start:\n{log.read_text()}")


def open_file(page: Page, lab: str, name: str) -> None:
    """Open a file in JupyterLab."""
    page.goto(f"{lab}/tree/{name}?token={TOKEN}")


def wait_for_kernel(page: Page) -> None:
    """Wait until the kernel of the notebook that is open is connected and idle.

    A server that is told to end while a page connects to a kernel may never end.
    """
    page.locator("#jp-main-statusbar").get_by_text("| Idle").wait_for()


def run_all(page: Page, lab: str, name: str) -> None:
    """Open a notebook and run all of its cells, as a reader does: by the menu, once the kernel is there."""
    open_file(page, lab, name)
    wait_for_kernel(page)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_text("Run All Cells", exact=True).click()
    page.wait_for_function(RAN, polling=POLLS)
    wait_for_kernel(page)


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
    expect(page.locator(PICTURES)).to_have_count(pictures)


def without_network(page: Page) -> list[str]:
    """Let the page reach this machine alone; the list that is returned has what it asks elsewhere from now on."""
    asked: list[str] = []
    elsewhere = re.compile(r"^\w+://(?!127\.0\.0\.1[:/])")
    page.route(elsewhere, lambda route: (asked.append(route.request.url), route.abort()))
    return asked


def write_below(editor: Locator, line: str, text: str) -> None:
    """Type a line into an editor of CodeMirror, below the one that has this text."""
    _type(editor.locator(".cm-line", has_text=line), "End", "Enter", text)


def write_over(line: Locator, text: str) -> None:
    """Type a text over a line in an editor of CodeMirror."""
    _type(line, "End", "Shift+Home", "Delete", text)


def _type(line: Locator, *keys_and_text: str) -> None:
    """Click on a line, press keys, and type a text."""
    *keys, text = keys_and_text
    line.click()
    for key in keys:
        line.page.keyboard.press(key)
    line.page.keyboard.type(text)


@contextlib.contextmanager
def asking_kernel(folder: Path) -> Iterator[Callable[[str], Any]]:
    """A function that evaluates an expression in the kernel of a `jupyterlab` over the folder."""
    (connection,) = (folder / ".home" / "runtime").glob("kernel-*.json")
    client = BlockingKernelClient(connection_file=str(connection))
    client.load_connection_file()
    client.start_channels()

    def ask(expression: str) -> Any:
        asked = {"user_expressions": {"answer": expression}, "store_history": False}
        reply = client.execute("", reply=True, timeout=HANGS / 1000, **asked)
        answer = reply["content"]["user_expressions"]["answer"]
        assert answer["status"] == "ok", "\n".join(answer.get("traceback", [str(answer)]))
        return ast.literal_eval(answer["data"]["text/plain"])

    try:
        yield ask
    finally:
        client.stop_channels()


def drive(explorer: Locator, number: int, ask: Callable[[str], Any], states: int) -> None:
    """Move the controls of the ``explore`` of this number until so many other pictures or messages have been seen.

    Raises
    ------
    AssertionError
        If texts or picture are not those of the state that the kernel has, or if more than half of the moves change
        neither picture nor message: of one move, both states may look the same.
    """
    chance = random.Random(number)
    seen = _wait_for(explorer, number, ask, None)
    others = turn = 0
    while others < states:
        free = explorer.locator(".jupyter-button").filter(has_not_text=re.compile(r"\d")).all()
        if free and turn % 3:
            chance.choice(free).click()
        else:
            moving = explorer.locator(".noUi-handle, select:has(option:nth-child(2))").all()
            move(moving[turn % len(moving)])
        before, seen = seen, _wait_for(explorer, number, ask, seen)
        others += any(seen[part] != before[part] for part in ("picture", "message"))
        assert 2 * others >= turn, f"no other picture after controls were moved to {seen['controls']}"
        turn += 1


def move(control: Locator) -> None:
    """Move a slider or a list to its next position, from the last one to the first."""
    if control.evaluate("control => control.tagName") == "SELECT":
        chosen, options = control.evaluate("control => [control.selectedIndex, control.length]")
        control.select_option(index=(chosen + 1) % options)
        return
    control.press("Home" if control.evaluate(IS_LAST) else "ArrowRight")


def play(buttons: Locator, explorer: Locator, number: int, ask: Callable[[str], Any]) -> None:
    """Let the `Play` of an ``explore`` move its slider on, stop it, and compare what is seen.

    Raises
    ------
    AssertionError
        As in `drive`.
    """
    seen = explorer.evaluate(SEEN)
    start_or_stop = buttons.locator("button").first
    start_or_stop.click()
    expect(explorer.locator(".widget-readout")).not_to_have_text(seen["controls"][-1])
    start_or_stop.click()
    _wait_for(explorer, number, ask, seen)


def _wait_for(explorer: Locator, number: int, ask: Callable[[str], Any], before: Any) -> Any:
    """What is seen of an ``explore`` once its controls are not as before, if it is the state that the kernel has.

    The kernel draws for the controls in a thread of its own, and the state is drawn too: never both at once.
    """
    ends = time.monotonic() + HANGS / 1000
    right = None
    while time.monotonic() < ends:
        seen = explorer.evaluate(SEEN)
        moved = before is None or seen["controls"] != before["controls"]
        if moved and ask(f"is_shown({number})"):
            right = ask(f"explorer_state({number})")
            if seen == right:
                return seen
        time.sleep(POLLS / 1000)
    assert moved, f"no control moved from {seen['controls']}"
    assert right is not None, f"the kernel shows nothing for {seen['controls']}"
    assert seen["controls"] == right["controls"], f"{seen['controls']} is shown, but the kernel has {right['controls']}"
    assert seen["message"] == right["message"]
    assert seen["alt"] == right["alt"]
    assert seen["picture"] == right["picture"], f"the picture is not that of {right['controls']}"
    raise AssertionError(f"what is seen of {seen['controls']} was not the kernel's state in time")


# The site ------------------------------------------------------------------------------------------------------------

# As a text: of thousands of values Playwright would describe each by itself.
OF_FILES = "/source/"  # in the address of a page with a file's text
READ = """() => JSON.stringify({
    links: [...document.links].map(link => link.href),
    places: [...document.querySelectorAll("[id], a[name]")].flatMap(place => [place.id, place.name]),
    unseen: [...document.images].filter(image => !image.naturalWidth).map(image => image.src),
})"""
CONTRAST = """() => {
    const {color, backgroundColor} = getComputedStyle(document.body);
    const [text, paper] = [color, backgroundColor].map(shade => {
        const linear = shade.match(/[\\d.]+/g).slice(0, 3).map(part => (part / 255) ** 2.2);
        return 0.05 + 0.21 * linear[0] + 0.72 * linear[1] + 0.07 * linear[2];
    });
    return {dark: text > paper, ratio: Math.max(text / paper, paper / text)};
}"""

# The texts of the controls above a picture of the site, and the picture once it is loaded, or the message in its place.
FRAME = """async controls => {
    const picture = controls.parentElement.querySelector("img");
    const message = picture.nextElementSibling;
    if (!picture.hidden) await picture.decode();
    return {
        labels: [...controls.querySelectorAll("label")].map(label =>
            label.querySelector("select")?.selectedOptions[0].textContent ?? label.querySelector("output").textContent),
        picture: picture.hidden ? null : picture.src.split("/").at(-1),
        alt: picture.hidden ? null : picture.alt,
        message: message.hidden ? null : message.textContent,
    };
}"""
# What the script of the site has drawn: cells, texts, and how many strokes lie over cells.
DRAWN = """svg => ({
    cells: [...svg.querySelectorAll("rect")].map(cell => [
        ...["x", "y", "width", "height"].map(name => Number(cell.getAttribute(name))),
        cell.getAttribute("fill").toLowerCase(), cell.getAttribute("stroke").toLowerCase()]),
    texts: [...svg.querySelectorAll("text")].map(text =>
        [...["x", "y"].map(name => Number(text.getAttribute(name))), text.textContent]),
    strokes: svg.querySelectorAll("path").length,
})"""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server of the files in a folder."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def complaints(page: Page) -> list[str]:
    """A list that from now on receives what the page's scripts and downloads complain of."""
    found: list[str] = []

    def listen(said):
        where = said.location["url"]
        if said.type == "error" and not where.endswith("/favicon.ico"):  # which browsers ask for unbidden
            found.append(f"{page.url}: {said.text} ({where})")

    page.on("console", listen)
    page.on("pageerror", lambda error: found.append(f"{page.url}: {error}"))
    return found


def follow_links(page: Page, site: str) -> tuple[set[str], list[str]]:
    """Open the page that is shown and whatever its links reach within the site.

    Returns
    -------
    tuple of set of str and list of str
        The addresses that were opened, and in words each link to no page or to no place in one, and each picture that
        is not shown.
    """
    wrong: list[str] = []
    places: dict[str, set[str]] = {}  # of each address
    leading = {page.url: "the first page"}  # who leads to each target
    waiting = [page.url]
    while waiting:
        address = urldefrag(waiting.pop()).url
        if address in places:
            continue
        read = _read(page, address)
        places[address] = set(read["places"])
        wrong += [f"{address}: {picture} is not shown" for picture in read["unseen"]]
        inside = [link for link in read["links"] if link.startswith(site)]
        waiting += inside
        leading = dict.fromkeys(inside, address) | leading
    for target, source in leading.items():
        address, place = urldefrag(target)
        if not places[address]:
            wrong.append(f"{source}: {target}: there is no such page")
        elif unquote(place) not in places[address]:
            wrong.append(f"{source}: {target}: there is no such place")
    return set(places), wrong


def unseen_pictures(page: Page, address: str) -> list[str]:
    """Open a page, and name each of its pictures that is not shown."""
    return [f"{address}: {picture} is not shown" for picture in _read(page, address)["unseen"]]


def search(page: Page, word: str) -> None:
    """Type a word into the search of the site, and open what is found first."""
    box = page.get_by_placeholder("Search")
    box.fill(word)
    box.press("Enter")
    page.locator("#search-results .search li a").first.click()


def _read(page, address):
    """What is on a page; of a file's text, which has no script, its places; of anything else, that it is there."""
    if address.endswith((".html", "/")) and OF_FILES not in address:
        response = page.goto(address)
        found = json.loads(page.evaluate(READ))
    else:
        response = page.request.get(address)
        places = re.findall(r' (?:id|name)="([^"]*)"', response.text()) if OF_FILES in address else []
        found = {"links": [], "places": places, "unseen": []}
    return found | {"places": [*found["places"], ""] if response.ok else []}
