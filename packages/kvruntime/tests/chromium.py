"""A headless Chromium under a test's hands, by its DevTools protocol over two pipes.

Knows how to start it, ask it something, press its keys and take its picture. Does not know what is on
the pages.
"""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

_PATIENCE = 60.0  # seconds, for a machine that is busy
_KEYS = {
    "Tab": ("Tab", 9, ""),
    "Enter": ("Enter", 13, "\r"),
    "Escape": ("Escape", 27, ""),
    "End": ("End", 35, ""),
    "ArrowLeft": ("ArrowLeft", 37, ""),
    "ArrowUp": ("ArrowUp", 38, ""),
    "ArrowRight": ("ArrowRight", 39, ""),
    "ArrowDown": ("ArrowDown", 40, ""),
    "Space": (" ", 32, " "),
}


class BrowserFailed(RuntimeError):
    """The browser did not do what it was asked."""


class Chromium:
    """One browser process."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None, "tests that need it are skipped without it"
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # The browser reads file descriptor 3 and writes 4: move ours out of their way first.
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs_in, theirs_out)]
        log = os.open(folder / "chromium.log", os.O_CREAT | os.O_WRONLY, 0o600)
        command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu"]
        command += ["--remote-debugging-pipe", "--no-first-run", "--disable-background-networking"]
        command += ["--disable-backgrounding-occluded-windows", "--disable-renderer-backgrounding"]
        command += ["--hide-scrollbars", f"--user-data-dir={folder / 'profile'}", "about:blank"]
        actions = [(os.POSIX_SPAWN_DUP2, high[0], 3), (os.POSIX_SPAWN_DUP2, high[1], 4)]
        actions += [(os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)]
        self._pid = os.posix_spawn(CHROMIUM, command, os.environ, file_actions=actions, setpgroup=0)
        for fd in (theirs_in, theirs_out, *high, log):
            os.close(fd)
        self._buffer = b""
        self._last = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._pages: dict[str, Page] = {}

    def open(self, url: str, width: int = 1280, height: int = 860, *, dark: bool = False) -> "Page":
        """A new page, in a profile of its own, that has loaded a URL."""
        context = self.command("Target.createBrowserContext")["browserContextId"]
        target = self.command("Target.createTarget", url="about:blank", browserContextId=context)
        attached = self.command("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        page = self._pages[attached["sessionId"]] = Page(self, attached["sessionId"], context)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.command(f"{domain}.enable")
        page.resize(width, height)
        page.prefer(dark=dark)
        page.command("Page.bringToFront")  # who is behind is drawn seldom or never
        page.command("Page.navigate", url=url)
        page.wait_for("document.readyState === 'complete'")
        return page

    def command(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Give a command and wait for its answer."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _PATIENCE
        while self._last not in self._answers:
            self._read(deadline - time.monotonic())
        answer = self._answers.pop(self._last)
        if "error" in answer:
            raise BrowserFailed(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def close(self) -> None:
        """End the browser and what it started."""
        os.close(self._out)
        os.close(self._in)
        os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def _read(self, patience: float) -> None:
        if patience <= 0 or not select.select([self._in], [], [], patience)[0]:
            raise BrowserFailed(f"the browser did not answer for {_PATIENCE:.0f} s")
        data = os.read(self._in, 2**20)
        if not data:
            raise BrowserFailed("the browser has ended")
        *messages, self._buffer = (self._buffer + data).split(b"\0")
        for text in messages:
            message = json.loads(text)
            if "id" in message:
                self._answers[message["id"]] = message
            elif (page := self._pages.get(message.get("sessionId", ""))) is not None:
                page.hear(message["method"], message["params"])


class Page:
    """One page: `complaints` are its errors and warnings, `urls` what it asked for."""

    def __init__(self, browser: Chromium, session: str, context: str) -> None:
        self._browser = browser
        self._session = session
        self._context = context
        self.complaints: list[str] = []
        self.urls: list[str] = []

    def command(self, method: str, **params: Any) -> dict[str, Any]:
        """Give a command of this page's own."""
        return self._browser.command(method, self._session, **params)

    def hear(self, method: str, params: dict[str, Any]) -> None:
        """Note what the browser says of this page."""
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in {"error", "warning"}:
            said = [str(arg.get("value", arg.get("description"))) for arg in params["args"]]
            self.complaints.append(" ".join(said))
        elif method == "Log.entryAdded" and params["entry"]["level"] in {"error", "warning"}:
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.urls.append(params["request"]["url"])

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript, awaited."""
        answer = self.command(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise BrowserFailed(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until an expression is true, or an element is there."""
        deadline = time.monotonic() + _PATIENCE
        while not self.evaluate(f"Boolean({expression})"):
            if time.monotonic() > deadline:
                raise BrowserFailed(f"not true after {_PATIENCE:.0f} s: {expression}")
            time.sleep(0.03)

    def reload(self) -> None:
        """Load the page again."""
        self.evaluate("window.isOld = true")
        self.command("Page.reload")
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            with contextlib.suppress(BrowserFailed):  # in between there is no page to ask
                if self.evaluate("!window.isOld && document.readyState === 'complete'"):
                    return
        raise BrowserFailed(f"the page has not loaded again for {_PATIENCE:.0f} s")

    def text(self, selector: str) -> str:
        """The text that is seen of an element."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, selector: str) -> None:
        """Click the middle of an element with the mouse."""
        box = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({ block: 'center', behavior: 'instant' });"
            " const b = e.getBoundingClientRect();"
            " return [b.left + b.width / 2, b.top + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.command(
                "Input.dispatchMouseEvent",
                type=kind,
                x=box[0],
                y=box[1],
                button="left",
                clickCount=1,
            )

    def point(self, x: float, y: float) -> None:
        """Move the mouse."""
        self.command("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, name: str, times: int = 1) -> None:
        """Press a key."""
        key, code, text = _KEYS[name]
        for _ in range(times):
            self.command(
                "Input.dispatchKeyEvent",
                type="keyDown" if text else "rawKeyDown",
                key=key,
                code=name,
                windowsVirtualKeyCode=code,
                **({"text": text} if text else {}),
            )
            self.command(
                "Input.dispatchKeyEvent",
                type="keyUp",
                key=key,
                code=name,
                windowsVirtualKeyCode=code,
            )

    def type(self, text: str) -> None:
        """Write into what has the focus."""
        self.command("Input.insertText", text=text)

    def resize(self, width: int, height: int) -> None:
        """Another size of the window."""
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def prefer(self, *, dark: bool) -> None:
        """What the reader's system prefers."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> None:
        """Write a PNG of what is seen."""
        path.write_bytes(base64.b64decode(self.command("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        """Close the page and forget its profile."""
        self._browser.command("Target.disposeBrowserContext", browserContextId=self._context)
