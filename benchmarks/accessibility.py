"""What axe-core finds wrong with the page: in light, in dark and on a phone, in every state of the chat.

axe-core comes from npm, in one version whose bytes are known. It runs in Chromium, before `cloister serve` with the embedded
model.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness import MODEL, Bench, make_parser
from cloister.client.residue_audit.node import ServeProgram
from tests.browser import Browser, Keys, browsing

AXE, AXE_SHA256 = "axe-core@4.14.1", "e6b0ce02b84d892e2e33e403485e7f3d6c29e2be6df65daf44d89ba564139745"
DOWNLOAD_TIMEOUT_S = 60.0
DONE = "li:last-child > .turn.assistant[aria-busy=false] .turn-buttons"
ANSWER = r"""# Hash tables

**Bold**, *slanted*, `code`, a [link](https://example.org/), and \(x^2\):

$$\frac{1}{2}$$

| name | size |
|---|--:|
| a | 1 |

> quoted

```python
def slot(key):  # a comment
    return hash(key) % 12 + len("text")
```
"""
LOOKS = {"light": (1280, 800, False), "dark": (1280, 800, False), "phone": (390, 844, True), "dark phone": (390, 844, True)}


def read_axe(folder: Path) -> str:
    """Returns the script, from npm."""
    npm = shutil.which("npm")
    if npm is None:
        sys.exit("axe-core comes by npm, which is not installed.")
    said = subprocess.run(
        [npm, "pack", "--silent", AXE], cwd=folder, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=True
    )
    package = folder / said.stdout.strip()
    if hashlib.sha256(package.read_bytes()).hexdigest() != AXE_SHA256:
        sys.exit(f"{AXE} is not the file that it was.")
    with tarfile.open(package) as archive:
        member = archive.extractfile("package/axe.min.js")
        assert member is not None
        return member.read().decode()


def visit(page: Browser, folder: Path, judge: Callable[[str], None]) -> None:
    """Brings the page from state to state and has each judged."""

    def act(action: str) -> None:
        page.click("#turns > li:last-child [aria-label=More]")
        page.click_text(".menu-row", action)

    judge("welcome")
    notes = folder / "notes.txt"
    notes.write_text("a note\n" * 3)
    page.driver.find_element("id", "files").send_keys(str(notes))
    page.find("#attached li")
    judge("a file attached")
    page.click("#open-settings")
    page.click("#set-likelihoods")
    judge("settings")
    page.find("#set-format").find_element("css selector", "option[value=json_schema]").click()
    page.click_text("#settings .text-button", "Add a field")
    page.find("#schema-kind-1").find_element("css selector", "option[value=choice]").click()
    judge("form of a schema")
    page.find("#set-format").find_element("css selector", "option[value=text]").click()
    page.find("#set-max_tokens").send_keys("5")
    page.press(Keys.ESCAPE)
    page.run("document.getElementById('message').value = 'line\\n'.repeat(30)")
    page.find("#message").send_keys("end", Keys.ENTER)
    page.find(DONE)
    page.find(".ending button")
    page.click("#turns > li:last-child [aria-label='Edit: Answer']")
    judge("editing")
    page.run("document.querySelector('.edit textarea').value = arguments[0]", ANSWER)
    page.click(".edit [type=submit]")
    page.find(".prose math")
    judge("a conversation")
    page.click("#turns > li:last-child [aria-label=More]")
    judge("a menu")
    page.press(Keys.ESCAPE)
    act("What else it could have said")
    judge("likelihoods")
    page.press(Keys.ESCAPE)
    act("Request and response as JSON")
    judge("request and response")
    page.press(Keys.ESCAPE)
    act("Answer with other settings")
    judge("other settings")
    page.click("#exchange [type=submit]")
    page.wait(lambda: len(page.all(".compared .turn[aria-busy=false]")) == 2)
    judge("side by side")
    if page.all("#open-list"):
        page.click("#open-list")
    page.click("#new-conversation")
    page.find("#message").send_keys("hello", Keys.ENTER)
    page.find(DONE)
    if page.all("#open-list"):
        page.click("#open-list")
        page.find("#new-conversation")
    page.click(".row.current [aria-label^=More]")
    page.click_text(".menu-row", "Move to a folder")
    judge("a question")
    page.find("#asked").send_keys("Folder", Keys.ENTER)
    page.find(".folder")
    judge("the list")


def find(page: Browser) -> tuple[int, str]:
    """Returns how many rules the page breaks as it is now, and where."""
    script = """const done = arguments[0];
    axe.run(document).then(({ violations }) =>
        done(violations.map(({ id, nodes }) => `${id}: ${nodes.map((node) => node.target.join(" ")).join(", ")}`)));"""
    found = page.driver.execute_async_script(script)
    return len(found), "; ".join(found)


def measure(bench: Bench) -> None:
    """Judges every state in every look."""
    rows: list[tuple[str, str, int, str]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        axe = read_axe(folder)
        server = ServeProgram("open", ["--model", MODEL])
        url = str(server.client().base_url).rstrip("/")
        with contextlib.ExitStack() as stack:
            stack.callback(server.stop)
            page = stack.enter_context(browsing(folder / "browser"))
            for look, (width, height, is_phone) in LOOKS.items():
                page.resize(width, height, phone=is_phone)
                page.prefer(prefers_color_scheme="dark" if "dark" in look else "light", prefers_reduced_motion="reduce")
                page.open(url)
                page.run(axe)

                def judge(state: str, look: str = look) -> None:
                    rows.append((look, state, *find(page)))

                visit(page, folder, judge)
            page.run("document.body.append(document.createElement('button'))")
            found = find(page)
    bench.print_rows("Violations", ("look", "state", "violations", "what"), rows)
    bench.check("violations in all", sum(row[2] for row in rows), high=0)
    bench.check_true("a button without a name, put there, is found", "button-name" in found[1])
    bench.figures["states"] = len(rows)


def main() -> int:
    options = make_parser(__doc__).parse_args()
    bench = Bench("accessibility", "Accessibility of the page (axe-core)", "no violation in any state and look")
    measure(bench)
    return bench.finish(options)


if __name__ == "__main__":
    sys.exit(main())
