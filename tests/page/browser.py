"""Chromium for tests: windows of several sizes that record what the console says and what is requested."""

import os
import re
import shutil
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from axe_playwright_python.base import AXE_FILE_PATH
from playwright.async_api import Browser, ConsoleMessage, Locator, Page, Playwright, Request, ViewportSize

from tests.reference_fixtures import CHECKOUT

SCREENSHOTS = CHECKOUT / "build" / "page"
DEMO_PICTURE = CHECKOUT / "kestrel_grpc" / "demo_picture.png"
TIMEOUT_MS = 60_000
"""Longer than anything takes on a busy machine: a longer wait is a failure."""
DESKTOP: ViewportSize = {"width": 1200, "height": 900}
PHONE: ViewportSize = {"width": 390, "height": 844}
_ARGUMENTS = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # A camera that shows a moving pattern, and a user who allows it.
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
)
_AXE = Path(AXE_FILE_PATH).read_text(encoding="utf-8")
# What is hard to use for people with assistive technology, by the rules of WCAG 2.2 and common practice.
_RULES = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice")


def chromium() -> str | None:
    """The browser of the system; None where there is none."""
    return shutil.which("chromium")


async def launch(playwright: Playwright) -> Browser:
    """A browser with an empty profile."""
    return await playwright.chromium.launch(
        executable_path=chromium(), args=list(_ARGUMENTS), chromium_sandbox=os.geteuid() != 0, timeout=TIMEOUT_MS
    )


@dataclass
class Window:
    """A page that is open at `origin`."""

    page: Page
    origin: str
    problems: list[str] = field(default_factory=list[str])
    """Errors and warnings of the console, and exceptions of scripts."""
    requests: list[Request] = field(default_factory=list[Request])

    async def ask(self, skill: str, **fields: str) -> None:
        """Fill in what the skill needs, and ask."""
        await self.choose(skill)
        for name, text in fields.items():
            await self.find(f"#{name}").fill(text)
        await self.page.get_by_role("button", name="Ask", exact=True).click()

    async def get_answer(self, skill: str, **fields: str) -> None:
        """Ask, and wait until the answer is complete."""
        await self.ask(skill, **fields)
        await self.has_status("Complete.")

    def find(self, selector: str, *, has_text: str | re.Pattern[str] | None = None) -> Locator:
        """An element of the page, or several."""
        return self.page.locator(selector, has_text=has_text)

    async def choose(self, skill: str) -> None:
        """Choose a skill."""
        await self.find(f"[name=skill][value={skill}]").check()

    async def has_status(self, text: str) -> None:
        """Wait until the page says this about the answer."""
        await self.find("#status", has_text=re.compile(f"^{re.escape(text)}$")).wait_for()

    async def is_in_sight(self, selector: str) -> bool:
        """Returns True if all of an element is on the screen."""
        inside = "({top, bottom}) => top >= 0 && bottom <= innerHeight"
        shown = f"(element) => ({inside})(element.getBoundingClientRect())"
        return await self.find(selector).first.evaluate(shown)

    async def text(self, selector: str) -> str:
        """The text of an element."""
        return await self.find(selector).inner_text()

    async def sample(self, language: str) -> str:
        """The request as code."""
        await self.page.get_by_role("radio", name=language, exact=True).check()
        return await self.find("#sample-text").inner_text()

    async def center_of(self, selector: str) -> tuple[float, float]:
        """Where the middle of something that is drawn is, as fractions of the picture."""
        frame = await self.find("#frame").bounding_box()
        drawn = await self.find(selector).first.bounding_box()
        assert frame is not None
        assert drawn is not None
        x = (drawn["x"] + drawn["width"] / 2 - frame["x"]) / frame["width"]
        y = (drawn["y"] + drawn["height"] / 2 - frame["y"]) / frame["height"]
        return x, y

    async def screenshot(self, name: str) -> None:
        """Write what the page looks like, all of it."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        await self.page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)

    async def accessibility_problems(self) -> list[str]:
        """What axe-core finds."""
        await self.page.evaluate(_AXE)
        found: Any = await self.page.evaluate("(tags) => axe.run({runOnly: tags})", list(_RULES))
        return [
            f"{item['id']}: {item['help']}: {node['html']}"
            for item in found["violations"]
            for node in item["nodes"]
        ]

    def uploads(self) -> list[str]:
        """The requests that stored a picture."""
        return [item.url for item in self.requests if item.method == "PUT"]

    def body_of_last_request(self) -> Any:
        """The body of the last request that was asked of a skill."""
        return [item for item in self.requests if item.method == "POST"][-1].post_data_json


@asynccontextmanager
async def window(
    browser: Browser,
    origin: str,
    *,
    size: ViewportSize | None = None,
    scheme: Literal["light", "dark"] = "light",
    refusals: Collection[int] = (),
    has_example: bool = True,
) -> AsyncIterator[Window]:
    """Opens the page; at the end its console must be empty, but for `refusals`: statuses of the server.

    With `has_example` the page has asked about its example and has shown the answer.
    """
    is_phone = size is PHONE
    context = await browser.new_context(
        viewport=size or DESKTOP,
        color_scheme=scheme,
        has_touch=is_phone,
        is_mobile=is_phone,
        permissions=["camera"],
    )
    context.set_default_timeout(TIMEOUT_MS)
    try:
        opened = Window(await context.new_page(), origin)
        opened.page.on("console", lambda message: _note(opened, message, refusals))
        opened.page.on("pageerror", lambda error: _append(opened.problems, str(error)))
        opened.page.on("request", lambda request: _append(opened.requests, request))
        await opened.page.goto(origin)
        await opened.find("#server", has_text=re.compile("served by|token")).wait_for()
        if has_example:
            await opened.has_status("Complete.")
        yield opened
        assert opened.problems == []
        assert [item.url for item in opened.requests if not item.url.startswith((origin, "blob:", "data:"))] == []
    finally:
        await context.close()


def _append(found: list[Any], item: Any) -> None:
    found.append(item)


def _note(opened: Window, message: ConsoleMessage, refusals: Collection[int]) -> None:
    if message.type not in ("error", "warning"):
        return
    refused = re.search(r"the server responded with a status of (\d+)", message.text)
    if refused is None or int(refused[1]) not in refusals:
        opened.problems.append(message.text)
