"""docs/tutorials/web_page.md as written, but for its ports: a page of another origin shows an answer in pieces."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from playwright.async_api import async_playwright

from tests.page.browser import DEMO_PICTURE, TIMEOUT_MS, launch
from tests.reference_fixtures import CHECKOUT
from tests.test_readme import free_ports

TUTORIAL = (CHECKOUT / "docs" / "tutorials" / "web_page.md").read_text(encoding="utf-8")
PORTS: tuple[str, ...] = ("50055", "8001", "8080")
ACTIVATED = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


@pytest.fixture
def page_port(tmp_path: Path) -> Iterator[str]:
    """The port of a reader's page, whose server runs."""
    ports = dict(zip(PORTS, map(str, free_ports(len(PORTS))), strict=True))
    text = re.sub(rf"\b({'|'.join(PORTS)})\b", lambda found: ports[found[1]], TUTORIAL)
    (page,) = re.findall(r"^```html\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "index.html").write_text(page, encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    listening = f"until curl -sfo page.html localhost:{ports['8080']}; do sleep 1; done"
    script = "\n".join((*blocks, listening, "echo ready", "wait"))
    with subprocess.Popen(
        ("bash", "-euc", script),
        cwd=tmp_path,
        env=ACTIVATED,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as shell:
        try:
            assert shell.stdout is not None
            assert any(line == "ready\n" for line in shell.stdout)
            yield ports["8080"]
        finally:
            os.killpg(shell.pid, signal.SIGKILL)


async def test_the_page_of_the_tutorial_shows_an_answer_in_pieces(page_port: str):
    async with async_playwright() as playwright:
        browser = await launch(playwright)
        page = await browser.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        await page.goto(f"http://localhost:{page_port}/")
        # The answer as it was after each change.
        await page.evaluate(
            """() => {
                window.seen = [];
                const note = () => window.seen.push(document.querySelector("#answer").textContent);
                new MutationObserver(note).observe(document.querySelector("#answer"), {childList: true});
            }"""
        )
        await page.locator("#picture").set_input_files(DEMO_PICTURE)
        await page.locator("#ask").click()
        await page.locator("#answer", has_text=re.compile('"KITE"$')).wait_for()
        seen = await page.evaluate("window.seen")
        await browser.close()
        assert "a yellow star" in seen[-1]
        assert all(later.startswith(before) for before, later in pairwise(seen) if before)
        assert problems == []
