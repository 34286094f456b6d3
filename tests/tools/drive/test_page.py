# SPDX-License-Identifier: Apache-2.0
"""The page in a headless Chromium, where one is installed: keys are pressed, and its own figures are read."""

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from cosmos_predict2.data.video.media import read_image
from tests.programs import HANG_S, warm_python

# A stick of a gamepad forward, and nothing pressed.
GAMEPAD = "{axes: [0, -1, 0, 0], buttons: Array.from({length: 16}, () => ({value: 0}))}"
DRIVEN = "driven_" + 20 * "far_"  # a word that is wider than a phone
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """A page, by the protocol of its tools."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket, self.numbers, self.faults = socket, itertools.count(1), list[Any]()

    def call(self, method: str, **parameters: Any) -> Any:
        number = next(self.numbers)
        self.socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while (message := json.loads(self.socket.recv(HANG_S))).get("id") != number:
            self.faults += [message] if message["method"] in ("Runtime.exceptionThrown", "Log.entryAdded") else []
        assert "error" not in message, message
        return message["result"]

    def value(self, expression: str) -> Any:
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def wait(self, expression: str) -> None:
        for _ in range(int(20 * HANG_S)):
            if self.value(expression):
                return
            assert not self.faults, (expression, self.faults)
            time.sleep(0.05)
        pytest.fail(f"never: {expression}")

    def key(self, code: str, is_down: bool) -> None:
        self.call("Input.dispatchKeyEvent", type="keyDown" if is_down else "keyUp", code=code, key=code)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    flags = ("--suite", "toy", "--policy", "tests.tools.drive.test_drive:Pusher", "--out", str(tmp_path / DRIVEN))
    command = [warm_python(), "-m", "scripts.drive", "--port", "0", "--device", "cpu", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as page:
        assert page.stdout is not None
        yield next(line.split()[2] for line in page.stdout if line.startswith("drive at"))
        page.terminate()


@pytest.fixture
def browser() -> Iterator[Browser]:
    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--remote-allow-origins=*")
    with contextlib.ExitStack() as stack:
        # A short path, of a socket.
        place = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        command = [str(CHROMIUM), *flags, f"--user-data-dir={place}/browser", "about:blank"]
        own: dict[str, Any] = {"env": {**os.environ, "TMPDIR": place}, "stdout": subprocess.DEVNULL}
        process = stack.enter_context(subprocess.Popen(command, text=True, stderr=subprocess.PIPE, **own))
        assert process.stderr is not None
        address = next(line.split()[-1] for line in process.stderr if "DevTools listening" in line)
        host = address.split("/")[2]
        tabs = json.load(urllib.request.urlopen(f"http://{host}/json", timeout=HANG_S))
        page = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
        with connect(page, max_size=2**26) as socket:
            yield Browser(socket)
        process.terminate()
        process.stderr.read()


def looked_at(browser: Browser, path: Path) -> tuple[int, int]:
    """The size of a screenshot, in which the imagined picture and the simulator's are drawn in several colours."""
    path.write_bytes(base64.b64decode(browser.call("Page.captureScreenshot", format="png")["data"]))
    picture = read_image(str(path))
    for side in range(2):
        place = browser.value(
            f"(box => [box.left, box.top, box.right, box.bottom])(document.getElementById('picture{side}')"
            ".getBoundingClientRect())"
        )
        left, top, right, bottom = (max(0, round(bound)) for bound in place)
        assert len(picture[:, top:bottom, left:right].flatten(1).unique(dim=1)[0]) > 10, (side, place)
    return picture.shape[2], picture.shape[1]


def text(name: str) -> str:
    return f"document.getElementById('{name}').textContent"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_a_robot_is_driven_in_a_browser(served: str, browser: Browser, tmp_path: Path) -> None:
    for domain in ("Runtime", "Log", "Page"):
        browser.call(f"{domain}.enable")
    for width, height in ((1280, 800), (390, 844)):
        size = dict(width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        browser.call("Emulation.setDeviceMetricsOverride", **size)
        browser.call("Page.navigate", url=served)
        browser.wait("document.querySelectorAll('#numbers tr').length === 4 && picture0.width === 48")
        browser.value("document.getElementById('record').click()")
        browser.key("KeyD", True)
        browser.wait(f"+{text('lag')} > 0 && +{text('rate')} > 0 && +{text('caption0')}.match(/\\d+/) > 4")
        assert browser.value("document.getElementById('now0').value") == 1
        browser.key("KeyD", False)
        browser.value("document.getElementById('autopilot').click()")
        browser.wait(f"{text('caption0')}.includes('by the policy')")
        browser.value("document.getElementById('record').click()")
        browser.wait(f"{text('text')}.startsWith('Episode')")
        browser.key("ArrowDown", True)
        browser.wait(f"!{text('caption0')}.includes('by the policy')")
        browser.key("ArrowDown", False)
        browser.value(f"navigator.getGamepads = () => [{GAMEPAD}]")
        browser.wait("document.getElementById('now1').value === 1 && document.getElementById('now0').value === 0")
        browser.value("navigator.getGamepads = () => []")
        assert browser.value("document.documentElement.scrollWidth") <= width and not browser.faults
        assert looked_at(browser, tmp_path / f"{width}.png") == (width, height)
    assert len((tmp_path / DRIVEN / "meta/episodes.jsonl").read_text().splitlines()) == 2
