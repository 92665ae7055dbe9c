"""What a reader's browser makes of a page: Chromium without a window, on a pipe."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)

SHOWN = """Promise.allSettled([...document.images].map(image => {
    image.loading = "eager";
    return image.decode();
})).then(() => null)"""
"""Pictures further down are loaded when a reader gets there."""

BROKEN = """[...document.images]
    .filter(image => !image.complete || !image.naturalWidth)
    .map(image => image.src)"""


class Browser:
    """The commands of Chrome's DevTools protocol that a look at a page takes."""

    def __init__(self, sink: BinaryIO, source: BinaryIO) -> None:
        self.sink, self.source = sink, source
        self.session, self.count, self.rest, self.events = None, 0, b"", []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def read(self) -> dict:
        """Return the next message, each of which ends in a zero byte."""
        while b"\0" not in self.rest:
            found = os.read(self.source.fileno(), 1 << 16)
            assert found, "the browser has ended"
            self.rest += found
        message, self.rest = self.rest.split(b"\0", 1)
        return json.loads(message)

    def call(self, method: str, **params) -> dict:
        """Send a command and return its result; what happens meanwhile is kept."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        self.sink.write(json.dumps(message).encode() + b"\0")
        self.sink.flush()
        while (answer := self.read()).get("id") != self.count:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def look(self, page: Path) -> tuple[str, list[str]]:
        """Load a page, -> its title, and what went wrong."""
        self.events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not any(
            each.get("method") == "Page.loadEventFired" for each in self.events
        ):
            self.events.append(self.read())
        self.value(SHOWN)
        wrong = [f"broken image: {each}" for each in self.value(BROKEN)]
        return self.value("document.title"), wrong + list(self.errors())

    def value(self, script: str):
        """Run a script on the page, -> what it says or promises."""
        given = {"expression": script, "returnByValue": True, "awaitPromise": True}
        found = self.call("Runtime.evaluate", **given)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def errors(self) -> Iterator[str]:
        """Yield what the console has in red."""
        for event in self.events:
            method, params = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                yield f"exception: {params['exceptionDetails']}"
            elif method == "Runtime.consoleAPICalled" and params["type"] == "error":
                yield f"console: {params['args']}"
            elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
                yield f"log: {params['entry']['text']} {params['entry'].get('url')}"


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Start Chromium; its profile is a folder that may go away."""
    assert CHROMIUM
    (its_in, to_browser), (from_browser, its_out) = os.pipe(), os.pipe()

    def hand_over() -> None:
        """Put the pipes where the protocol has them: 3 and 4."""
        ends = os.dup(its_in), os.dup(its_out)
        os.dup2(ends[0], 3)
        os.dup2(ends[1], 4)

    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu"]
    command += ["--disable-dev-shm-usage", "--remote-debugging-pipe"]
    started = subprocess.Popen(
        [*command, f"--user-data-dir={profile}", "about:blank"],
        preexec_fn=hand_over,
        pass_fds=(3, 4),
        stderr=subprocess.DEVNULL,
    )
    os.close(its_in)
    os.close(its_out)
    try:
        with (
            os.fdopen(to_browser, "wb") as sink,
            os.fdopen(from_browser, "rb") as source,
        ):
            yield Browser(sink, source)
    finally:
        started.terminate()
        started.wait()
