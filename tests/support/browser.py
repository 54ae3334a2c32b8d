"""A headless Chromium or Chrome, told what to do over two pipes (the DevTools protocol): what pages look like, and what they complain of.

`CHROME` names it, where it is not found on PATH.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_TIMEOUT_S = 30.0


def find_chrome() -> str:
    """Return its path, or nothing."""
    return os.environ.get("CHROME") or next((path for name in NAMES if (path := shutil.which(name))), "")


class Browser:
    """One page after the other. Use it as a context manager."""

    def __init__(self, chrome: str):
        self.complaints: list[str] = []
        """Of the page that is open: errors and warnings of its console, exceptions, and files that are not there."""
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs, self._to = os.pipe()
        self._from, answers = os.pipe()
        # Chrome reads its commands from descriptor 3 and writes to 4.
        redirect = 'exec 3<&"$0" 4>&"$1"; shift; exec "$@"'
        how = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--allow-file-access-from-files"]
        command = ["bash", "-c", redirect, str(theirs), str(answers), chrome, *how, f"--user-data-dir={self._profile.name}"]
        self._process = subprocess.Popen(command, pass_fds=(theirs, answers), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        os.close(theirs), os.close(answers)
        self._read, self._nth, self._session = b"", 0, None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: Any) -> None:
        self._process.terminate()
        self._process.wait()
        os.close(self._to), os.close(self._from)
        self._profile.cleanup()

    def open(self, page: Path, width: int, height: int = 900) -> None:
        """Load a page of this machine, in a window of so many CSS pixels; narrower ones than 600 are of a phone."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        self.complaints.clear()
        self._is_loaded = False
        self._call("Page.navigate", url=page.resolve().as_uri())
        self._until(lambda: self._is_loaded, f"{page} to load")

    def value(self, expression: str) -> Any:
        """Return what JavaScript says."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']['text']}")
        return answer["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Return what JavaScript says, once it is true."""
        found: list[Any] = []

        def look() -> bool:
            found[:] = [self.value(expression)]
            time.sleep(0.05)
            return bool(found[0])

        self._until(look, expression)
        return found[0]

    def screenshot(self, path: Path) -> None:
        """Write the window as a PNG."""
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def _until(self, done: Any, what: str) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        while not done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the browser did not get {what} in {_TIMEOUT_S:.0f} s")
            self.value("0")  # events come with answers

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        self._nth += 1
        message = {"id": self._nth, "method": method, "params": arguments} | ({"sessionId": self._session} if self._session else {})
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._nth:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._note(answer.get("method", ""), answer.get("params", {}))

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            if not select.select([self._from], [], [], _TIMEOUT_S)[0]:
                raise TimeoutError(f"the browser said nothing for {_TIMEOUT_S:.0f} s")
            block = os.read(self._from, 1 << 16)
            if not block:
                raise RuntimeError("the browser has ended")
            self._read += block
        line, self._read = self._read.split(b"\0", 1)
        return json.loads(line)

    def _note(self, event: str, of: dict[str, Any]) -> None:
        if event == "Page.loadEventFired":
            self._is_loaded = True
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(of["exceptionDetails"].get("exception", {}).get("description", of["exceptionDetails"]["text"]))
        elif event == "Runtime.consoleAPICalled" and of["type"] in ("error", "warning", "assert"):
            self.complaints.append(" ".join(str(each.get("value", each.get("description"))) for each in of["args"]))
        elif event == "Log.entryAdded" and of["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{of['entry']['text']} {of['entry'].get('url', '')}".strip())
        elif event == "Network.loadingFailed" and not of.get("canceled"):
            self.complaints.append(f"a file did not load: {of['errorText']}")
