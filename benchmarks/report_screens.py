"""Take pictures of reports in a browser, at three widths, dark and light, and check the pages.

    python benchmarks/report_screens.py [-o pictures] [--pages good,failed] [--browser PATH]

Trains a small model on CPUs for each page: a run that ends well, one that fails, one that fails
and goes on, a pipeline, states on a disk, and two runs side by side. Chromium opens each file and
is asked what its console says, what else the page loads, and whether the page is wider than the
window. Without Chromium the pages are written, and nothing more. Exit code 1: a page is not as it
should be.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from render import render

ROOT = Path(__file__).resolve().parents[1]
WIDTHS = (420, 1280, 1920)
SCHEMES = ("dark", "light")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MOST_BYTES = 1_000_000
_TALLEST = 16_000  # of a picture, in pixels
_PATIENCE_S = 60.0
_SETTLE_S = 0.2  # in which a page says what it has to say
BREAKS_AT = 12  # step
JOB = """
name: screens
slots: 2
device: cpu
model:
  call: zrun_core.models.gpt:gpt
  args: {vocab_size: 256, dim: 64, depth: 4, heads: 4, seq_len: 64}
data: {call: "zrun_core.data.text:text", args: {paths: stdlib, seq_len: 64}, shuffle: true}
steps: 30
batch: {global: 16, micro: 2}
zero: 2
optim: {lr: 1.0e-3, clip: 1.0}
lr: {schedule: cosine, warmup: 5}
checkpoint: {every: 10, keep: 2}
eval:
  data: {call: "zrun_core.data.text:text", args: {paths: stdlib, split: val, seq_len: 64}}
  every: 10
  samples: 32
log: {every: 2}
hooks: {on_step: "hook.py:on_step"}
"""
HOOK = f"""
import os


def on_step(context):
    context.metric("steps_left", 30 - context.step)
    if os.environ.get("BREAKS") and context.step == {BREAKS_AT}:
        raise RuntimeError("this run was asked to fail")
"""


# The pages


class Runs:
    """Makes runs and their pages in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "job.yaml").write_text(JOB)
        (folder / "hook.py").write_text(HOOK)

    def zrun(self, *arguments: str, breaks: bool = False) -> int:
        """Run a command of zrun; return its exit code."""
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        env = os.environ | {"PYTHONPATH": paths} | ({"BREAKS": "1"} if breaks else {})
        command = [sys.executable, "-m", "zrun", *arguments]
        done = subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True)
        if done.returncode and not breaks:
            raise SystemExit(f"zrun {' '.join(arguments)}:\n{done.stdout}{done.stderr}")
        return done.returncode

    def train(self, name: str, *keys: str, breaks: bool = False) -> None:
        """Train in the run directory `name`."""
        self.zrun("train", "job.yaml", "--run-dir", name, *keys, breaks=breaks)

    def report(self, name: str, *others: str) -> Path:
        """Return the page of a run, or of several."""
        target = self.folder / f"{name}.html"
        compared = ["--compare", *others] if others else []
        self.zrun("report", name, *compared, "-o", str(target))
        return target

    def good(self) -> Path:
        self.train("good")
        return self.report("good")

    def failed(self) -> Path:
        self.train("failed", breaks=True)
        return self.report("failed")

    def resumed(self) -> Path:
        self.train("resumed", breaks=True)
        self.train("resumed", "--resume", "auto")
        return self.report("resumed")

    def pipelined(self) -> Path:
        keys = ("slots=4", "parallel={pp: 2, tp: 2}", "zero=1")
        self.zrun("estimate", "job.yaml", *keys)  # so short a run would end before its own
        self.train("pipelined", *keys)
        return self.report("pipelined")

    def offloaded(self) -> Path:
        self.train("offloaded", "zero=3", "offload=disk")
        return self.report("offloaded")

    def compared(self) -> Path:
        for name, rate in (("slower", "1.0e-3"), ("faster", "3.0e-3")):
            self.train(name, f"optim.lr={rate}", "steps=20")
        page = self.report("slower", "faster")
        return page.rename(self.folder / "compared.html")


PAGES: dict[str, Callable[[Runs], Path]] = {
    "good": Runs.good,
    "failed": Runs.failed,
    "resumed": Runs.resumed,
    "pipelined": Runs.pipelined,
    "offloaded": Runs.offloaded,
    "compared": Runs.compared,
}


# The browser


class Browser:
    """Chromium, asked through two pipes: messages of JSON, each with a zero byte behind it."""

    def __init__(self, program: str, folder: Path) -> None:
        asks, asked = os.pipe()
        answered, answers = os.pipe()

        def join() -> None:
            os.dup2(asks, 3)
            os.dup2(answers, 4)

        self._process = subprocess.Popen(
            [
                program,
                "--headless=new",
                "--no-sandbox",  # which root has to leave out
                "--disable-gpu",
                "--hide-scrollbars",
                "--no-first-run",
                f"--user-data-dir={folder}",
                "--remote-debugging-pipe",
                "about:blank",
            ],
            pass_fds=(3, 4, asks, answers),
            preexec_fn=join,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(asks)
        os.close(answers)
        self._asked, self._answered = asked, answered
        os.set_blocking(answered, False)
        self._rest = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []
        targets = self.ask("Target.getTargets")["targetInfos"]
        page = next(each["targetId"] for each in targets if each["type"] == "page")
        attached = self.ask("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]

    _session: str | None = None

    def ask(self, method: str, **values: Any) -> dict[str, Any]:
        """Ask for something, and return the answer; what comes before it is kept in `events`."""
        self._number += 1
        question: dict[str, Any] = {"id": self._number, "method": method, "params": values}
        if self._session is not None:
            question["sessionId"] = self._session
        os.write(self._asked, json.dumps(question).encode() + b"\0")
        until = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until:
            for message in self._messages():
                if message.get("id") == self._number:
                    if "error" in message:
                        raise SystemExit(f"{method}: {message['error']['message']}")
                    found: dict[str, Any] = message["result"]
                    return found
                self.events.append(message)
            time.sleep(0.01)
        raise SystemExit(f"{method}: the browser does not answer")

    def _messages(self) -> Iterator[dict[str, Any]]:
        try:
            self._rest += os.read(self._answered, 1 << 24)
        except BlockingIOError:
            return
        *whole, self._rest = self._rest.split(b"\0")
        yield from [json.loads(each) for each in whole]

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(_PATIENCE_S)


@contextmanager
def browser(program: str) -> Iterator[Browser]:
    """Yield a browser with a profile of its own."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        found = Browser(program, Path(folder))
        try:
            yield found
        finally:
            found.close()


def look(at: Browser, page: Path, width: int, scheme: str, target: Path) -> list[str]:
    """Take a picture of a page; return what is wrong with it."""
    at.events.clear()
    for domain in ("Page", "Runtime", "Log", "Network"):
        at.ask(f"{domain}.enable")
    at.ask(
        "Emulation.setDeviceMetricsOverride",
        width=width, height=1000, deviceScaleFactor=1, mobile=False,
    )  # fmt: skip
    feature = {"name": "prefers-color-scheme", "value": scheme}
    at.ask("Emulation.setEmulatedMedia", features=[feature])
    at.ask("Page.navigate", url=page.as_uri())
    until = time.monotonic() + _PATIENCE_S
    while _value(at, "document.readyState") != "complete" and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(_SETTLE_S)
    height = min(int(_value(at, "document.documentElement.scrollHeight")), _TALLEST)
    clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
    shot = at.ask("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
    target.write_bytes(base64.b64decode(shot["data"]))
    wrong = list(dict.fromkeys(said(at.events, page)))
    wide = int(_value(at, "document.documentElement.scrollWidth"))
    if wide > width:
        wrong.append(f"{wide} pixels wide in a window of {width}")
    is_dark = sum(json.loads(_value(at, _GROUND))) < 3 * 128
    if is_dark != (scheme == "dark"):
        wrong.append(f"its ground is not {scheme}")
    return wrong


_GROUND = "'[' + getComputedStyle(document.body).backgroundColor.match(/\\d+/g).join() + ']'"


def _value(at: Browser, expression: str) -> Any:
    return at.ask("Runtime.evaluate", expression=expression)["result"].get("value")


def said(events: Sequence[dict[str, Any]], page: Path) -> Iterator[str]:
    """Yield what the console has said, and what was loaded beside the page."""
    for event in events:
        values = event.get("params", {})
        match event.get("method"):
            case "Runtime.consoleAPICalled":
                yield f"console: {values['type']}"
            case "Runtime.exceptionThrown":
                yield f"console: {values['exceptionDetails']['text']}"
            case "Log.entryAdded":
                yield f"console: {values['entry']['text']}"
            case "Network.requestWillBeSent":
                url = values["request"]["url"]
                if url != page.as_uri():
                    yield f"it loads {url[:80]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("-o", "--output", type=Path, default=Path("report-screens"))
    parser.add_argument("--pages", default=",".join(PAGES), help="which of them")
    parser.add_argument("--browser", help="Chromium's program, if it is not in PATH")
    given = parser.parse_args()
    names = given.pages.split(",")
    if unknown := [name for name in names if name not in PAGES]:
        parser.error(f"--pages: there is no {unknown[0]!r}: choose from {', '.join(PAGES)}")
    program = given.browser or next(filter(None, map(shutil.which, BROWSERS)), None)
    given.output.mkdir(parents=True, exist_ok=True)
    rows = []
    are_right = True
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        runs = Runs(Path(folder))
        for name in names:
            made = PAGES[name](runs)
            page = Path(shutil.copy(made, given.output / f"{name}.html")).resolve()
            wrong = pictures(program, page) if program else []
            if page.stat().st_size > MOST_BYTES:
                wrong.append(f"larger than {MOST_BYTES:,} bytes")
            are_right = are_right and not wrong
            rows.append([name, f"{page.stat().st_size:,}", "; ".join(wrong) or "as it should be"])
    print(render(("page", "bytes", "found"), rows))
    if program is None:
        print("No Chromium was found, so no picture was taken: install it, or name --browser.")
    else:
        print(f"{len(rows) * len(WIDTHS) * len(SCHEMES)} pictures are in {given.output}")
    return 0 if are_right else 1


def pictures(program: str, page: Path) -> list[str]:
    """Take all pictures of a page, beside it; return what is wrong with it."""
    wrong: list[str] = []
    with browser(program) as at:
        for width in WIDTHS:
            for scheme in SCHEMES:
                target = page.with_name(f"{page.stem}-{width}-{scheme}.png")
                found = look(at, page, width, scheme, target)
                wrong += [f"{width} {scheme}: {each}" for each in found]
    return wrong


if __name__ == "__main__":
    sys.exit(main())
