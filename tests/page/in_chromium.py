"""What people do with the page, in Chromium: ask, mark, stop, ask again, with mouse, touch and keyboard."""

import asyncio
import io
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import pytest_asyncio
from PIL import Image, ImageChops
from playwright.async_api import Browser, ViewportSize, async_playwright

from kestrel_client import Box, Segment
from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.images.image_uris import parse_hosts
from kestrel_grpc.server import Server
from kestrel_runtime.api.config import EngineConfig
from kestrel_runtime.api.errors import Overloaded
from kestrel_runtime.api.requests import Chat, Gaze
from kestrel_runtime.engine.engine import LocalEngine
from tests.clients.catalogue import CLIENTS
from tests.clients.environments import ENVIRONMENTS, install
from tests.fakes import HOLD, FakeEngine, answers
from tests.page.browser import DEMO_PICTURE, PHONE, Window, launch, window
from tests.server.frontends.http.test_frontend import tokens_in
from tests.server.http_calls import HttpServing, serving_http

pytestmark = pytest.mark.asyncio(loop_scope="module")

EXAMPLE_QUESTION = "What color is the star?"
"""What the page asks when it opens."""
STAR = (0.21, 0.72)
"""Where the star of the demo picture is."""
TOKEN = "kestrel_of_alice_00000000000000000000000000000000"
_FILE = io.BytesIO()
Image.new("RGB", (45, 63), "blue").save(_FILE, "PNG")
SECOND = _FILE.getvalue()
"""A picture that a further question adds."""
# Of the gRPC tools, those of this environment.
ACTIVATED = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        launched = await launch(playwright)
        yield launched
        await launched.close()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def nano() -> AsyncIterator[Server]:
    """The built-in model, with its adapters."""
    adapters = files("kestrel_runtime").joinpath("nano", "adapters")
    engine_config = EngineConfig(adapters=str(adapters), num_adapter_slots=1)
    config = ServerConfig(port=0, http_port=0, engine=engine_config)
    engine = await asyncio.to_thread(LocalEngine.start, config.engine_config())
    async with Server(engine, config) as server:
        yield server


def origin_of(server: Server) -> str:
    return f"http://localhost:{server.http_port}"


def holds(request: Any) -> list[object]:
    """An answer that stops behind its first piece until it is released; that about the example comes at once."""
    if getattr(request, "question", "") == EXAMPLE_QUESTION:
        return list(answers(request))
    return [*answers(request)[:2], HOLD, *answers(request)[2:]]


@asynccontextmanager
async def faked(
    browser: Browser,
    engine: FakeEngine | None = None,
    *,
    refusals: tuple[int, ...] = (),
    has_example: bool = True,
    **options: Any,
) -> AsyncIterator[tuple[HttpServing, Window]]:
    """A window at a server whose engine is scripted."""
    async with (
        serving_http(engine, **options) as rig,
        window(browser, origin_of(rig.server), refusals=refusals, has_example=has_example) as opened,
    ):
        if has_example:
            # What the test asks counts, and the example does not.
            await rig.engine.num_submitted.acquire()
            for asked in (rig.engine.requests, rig.engine.tenants, opened.requests):
                asked.clear()
        yield rig, opened


def near(found: tuple[float, float], expected: tuple[float, float]) -> bool:
    return all(abs(one - other) < 0.04 for one, other in zip(found, expected, strict=True))


# What the page opens with


@pytest.mark.parametrize("size", [None, PHONE])
async def test_the_page_opens_with_an_example_that_is_answered(
    browser: Browser, nano: Server, size: ViewportSize | None
):
    async with window(browser, origin_of(nano), size=size) as opened:
        assert await opened.text("#answer") == "yellow"
        assert await opened.text("#asked") == EXAMPLE_QUESTION
        for part in ("#picture", "#asked", "#answer"):
            assert await opened.is_in_sight(part)
        assert await opened.page.evaluate("scrollY") == 0
        # Nothing is drawn.
        assert await opened.find("#save-picture").is_hidden()
        # Nothing is stored of what nobody chose.
        assert opened.uploads() == []
        assert [item.url for item in opened.requests if item.method == "POST"] == [f"{origin_of(nano)}/v1/query"]
        if size is PHONE:
            # The keyboard, which is there while a field has the focus, does not cover the answer.
            await opened.find("#question").press("Enter")
            await opened.has_status("Complete.")
            assert await opened.page.evaluate("document.activeElement === document.body")
            assert await opened.is_in_sight("#answer")
        # With each skill the example is asked what suits it.
        await opened.get_answer("detect")
        assert await opened.find("#overlay rect.line").count() == 1
        await opened.page.get_by_role("button", name="Remove").click()
        assert await opened.find("#object").input_value() == ""


async def test_a_question_takes_the_place_of_the_example_that_is_being_asked(browser: Browser):
    def only_the_example(request: Any) -> list[object]:
        return [HOLD] if getattr(request, "question", "") == EXAMPLE_QUESTION else list(answers(request))

    async with faked(browser, FakeEngine(only_the_example), has_example=False) as (rig, opened):
        await rig.engine.num_submitted.acquire()
        await opened.get_answer("query", question="What bird is it?")
        assert await opened.text("#asked") == "What bird is it?"
        assert rig.engine.num_cancelled == 1


# The skills of a model


@pytest.mark.parametrize(("size", "scheme"), [(None, "light"), (PHONE, "light"), (PHONE, "dark")])
async def test_a_question_is_answered_with_its_confidence_and_timings(
    browser: Browser, nano: Server, size: ViewportSize | None, scheme: Literal["light", "dark"]
):
    async with window(browser, origin_of(nano), size=size, scheme=scheme) as opened:
        await opened.get_answer("query", question="What color is the star?")
        assert await opened.text("#answer") == "yellow"
        confidence = re.match(r"Confidence: ([\d.]+) %", await opened.text("#confidence"))
        assert confidence is not None
        assert 50 < float(confidence[1]) <= 100
        assert await opened.find("#timings").is_hidden()
        assert await opened.is_in_sight("#answer")
        await opened.page.get_by_text("Times, tokens and ids").click()
        assert "First token, in the server" in await opened.text("#timings")
        await opened.page.get_by_text("Times, tokens and ids").click()
        assert await opened.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        device = "phone" if size is PHONE else "desktop"
        await opened.screenshot(f"query-{device}" + ("-dark" if scheme == "dark" else ""))
        assert await opened.accessibility_problems() == []


async def test_a_description_is_as_long_as_is_asked(browser: Browser, nano: Server):
    async with window(browser, origin_of(nano)) as opened:
        await opened.find("[value=caption]").check()
        await opened.find("#length").select_option("short")
        await opened.get_answer("caption")
        assert "star" in await opened.text("#answer")
        assert opened.body_of_last_request()["length"] == "short"
        await opened.screenshot("caption-desktop")


async def test_points_are_drawn_where_the_objects_are(browser: Browser, nano: Server):
    async with window(browser, origin_of(nano)) as opened:
        await opened.get_answer("point", object="star")
        assert await opened.find("#overlay circle").count() == 1
        assert near(await opened.center_of("#overlay circle"), STAR)
        assert await opened.find("#answer li").count() == 1
        await opened.screenshot("point-desktop")


async def test_boxes_are_drawn_around_the_objects(browser: Browser, nano: Server):
    async with window(browser, origin_of(nano)) as opened:
        await opened.get_answer("detect", object="shape")
        assert await opened.find("#overlay rect.line").count() == 5
        await opened.find("#answer li").nth(1).hover()
        assert await opened.find("#overlay .lit rect").count() == 2
        await opened.screenshot("detect-desktop")
        # Drawings stay on their objects when the window changes its size.
        await opened.get_answer("detect", object="yellow star")
        await opened.page.set_viewport_size({"width": 500, "height": 700})
        width = await opened.find("#frame").evaluate("(frame) => frame.clientWidth")
        await opened.find(f'#overlay[viewBox^="0 0 {width} "]').wait_for()
        assert near(await opened.center_of("#overlay rect.line"), STAR)


async def test_several_objects_have_a_colour_each_with_a_legend_and_scores(browser: Browser, nano: Server):
    async with window(browser, origin_of(nano)) as opened:
        await opened.get_answer("detect", object="star; red circle; dog")
        body = opened.body_of_last_request()
        assert (body["objects"], "object" in body) == (["star", "red circle", "dog"], False)
        assert await opened.find("#overlay rect.line").count() == 2
        strokes = await opened.find("#overlay rect.line").evaluate_all(
            "(lines) => lines.map((line) => getComputedStyle(line).stroke)"
        )
        swatches = await opened.find("#answer .swatch").evaluate_all(
            "(swatches) => swatches.map((swatch) => getComputedStyle(swatch).backgroundColor)"
        )
        assert strokes == swatches[:2]
        assert len(set(swatches)) == 3
        rows = await opened.find("#answer .legend > li").all_inner_texts()
        assert [row.split(":")[0].split("\n")[0] for row in rows] == ["star", "red circle", "dog"]
        assert "nothing was found" in rows[2]
        assert "score 0.9" in rows[0]
        assert await opened.find("#overlay text").all_text_contents() == ["star 1", "red circle 1"]
        assert await opened.text("#asked") == "Boxes around “star”, “red circle”, “dog”"
        assert await opened.accessibility_problems() == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_an_outline_is_drawn(browser: Browser, nano: Server, scheme: Literal["light", "dark"]):
    size = PHONE if scheme == "dark" else None
    async with window(browser, origin_of(nano), size=size, scheme=scheme) as opened:
        await opened.get_answer("segment", object="yellow star")
        assert near(await opened.center_of("#overlay path.line"), STAR)
        await opened.screenshot("segment-phone-dark" if scheme == "dark" else "segment-desktop")
        assert await opened.accessibility_problems() == []


async def test_a_look_is_drawn_from_the_eye_that_is_clicked(browser: Browser):
    async with faked(browser) as (rig, opened):
        await opened.choose("gaze")
        frame = await opened.find("#frame").bounding_box()
        assert frame is not None
        await opened.page.mouse.click(frame["x"] + 0.25 * frame["width"], frame["y"] + 0.5 * frame["height"])
        assert near(await opened.center_of("#overlay circle.given"), (0.25, 0.5))
        await opened.get_answer("gaze")
        (request,) = rig.engine.requests
        assert isinstance(request, Gaze)
        assert near((request.eye.x, request.eye.y), (0.25, 0.5))
        assert await opened.find("#overlay line.line").count() == 1
        await opened.screenshot("gaze-desktop")


async def test_reasoning_is_shown_with_the_points_that_it_speaks_of(browser: Browser):
    async with faked(browser) as (_, opened):
        await opened.find("#reasoning").check()
        await opened.get_answer("query", question="What bird is it?")
        assert await opened.find("#thoughts").is_visible()
        assert await opened.find("#reasoning-text mark").count() > 0
        assert await opened.find("#overlay circle").count() > 0
        await opened.screenshot("reasoning-desktop")
        assert await opened.accessibility_problems() == []


# Streams, failures, overload


async def test_an_answer_is_shown_while_it_is_generated(browser: Browser):
    async with faked(browser, FakeEngine(holds)) as (rig, opened):
        await opened.ask("query", question="What bird is it?")
        await opened.find("#answer", has_text=re.compile(r"^a k$")).wait_for()
        assert await opened.find("#answer").get_attribute("aria-busy") == "true"
        rig.engine.release()
        await opened.has_status("Complete.")
        assert await opened.text("#answer") == "a kestrel"
        assert await opened.find("#answer").get_attribute("aria-busy") == "false"


async def test_a_stopped_stream_ends_the_request_and_keeps_what_has_come(browser: Browser):
    async with faked(browser, FakeEngine(holds)) as (rig, opened):
        await opened.ask("query", question="What bird is it?")
        await opened.find("#answer", has_text=re.compile(r"^a k$")).wait_for()
        await opened.page.get_by_role("button", name="Stop").click()
        await opened.has_status("Stopped.")
        await rig.engine.is_idle.wait()
        assert rig.engine.num_cancelled == 1
        assert await opened.text("#answer") == "a k"
        assert await opened.page.evaluate("document.activeElement.id") == "ask"
        await opened.screenshot("stopped-desktop")
        rig.engine.release()
        await opened.get_answer("query", question="And this?")


async def test_another_skill_or_picture_removes_the_answer_and_ends_the_request(browser: Browser):
    async with faked(browser, FakeEngine(holds)) as (rig, opened):
        assert await opened.find("#answer-heading").is_visible()
        await opened.choose("caption")
        assert await opened.text("#result") == ""
        assert await opened.find("#keep").is_hidden()
        changes = (opened.choose("point"), opened.page.get_by_role("button", name="Remove").click())
        for number, change in enumerate(changes, 1):
            await opened.ask("query", question="What bird is it?")
            await opened.find("#answer", has_text=re.compile(r"^a k$")).wait_for()
            await change
            assert await opened.text("#answer") + await opened.text("#status") == ""
            await rig.engine.is_idle.wait()
            assert rig.engine.num_cancelled == number
        assert await opened.find("#entries li").count() == 1


async def test_an_overload_says_when_to_try_again(browser: Browser):
    engine = FakeEngine(holds, max_queued_requests=1)
    async with faked(browser, engine, refusals=(429,)) as (rig, opened):
        first = asyncio.create_task(rig.ask("/v1/query", {"question": "?"}))
        await rig.engine.num_submitted.acquire()
        await opened.ask("query", question="What bird is it?")
        await opened.find("#error", has_text="QUEUE_FULL").wait_for()
        assert "in 1 s" in await opened.text("#error")
        await opened.screenshot("overload-desktop")
        assert await opened.accessibility_problems() == []
        rig.engine.release()
        assert (await first).status == 200
        await opened.page.get_by_role("button", name="Try again").click()
        await opened.has_status("Complete.")
        assert await opened.text("#error") == ""


async def test_a_refusal_names_the_fields_that_are_wrong(browser: Browser, nano: Server):
    async with window(browser, origin_of(nano), size=PHONE, refusals=(400,)) as opened:
        await opened.page.get_by_text("More settings").click()
        await opened.find("#constraint").select_option("regex")
        await opened.find("#constraint-text").fill("(")
        await opened.find("#top_p").fill("2")
        await opened.ask("query", question="What is in this image?")
        await opened.has_status("Failed.")
        assert "top_p: must be above 0 and at most 1" in await opened.text("#error")
        assert await opened.is_in_sight("#error")
        await opened.page.get_by_text("For a report").click()
        shown = await opened.text("#error")
        assert "INVALID_REQUEST" in shown
        assert "settings.top_p" in shown
        await opened.page.get_by_text("For a report").click()
        assert await opened.find("#top_p").get_attribute("aria-invalid") == "true"
        assert await opened.accessibility_problems() == []
        await opened.page.get_by_text("More settings").click()
        await opened.screenshot("error-phone")


async def test_what_is_missing_is_said_before_anything_is_sent(browser: Browser):
    async with faked(browser) as (rig, opened):
        await opened.page.get_by_role("button", name="Remove").click()
        await opened.ask("query")
        assert await opened.text("#problem") == "Write a question."
        assert await opened.page.evaluate("document.activeElement.id") == "question"
        await opened.ask("detect", object="star")
        assert await opened.text("#problem") == "Choose a picture first."
        await opened.page.get_by_text("More settings").click()
        await opened.find("#temperature").fill("0.5")
        await opened.ask("query", question="?", places="2,3")
        assert "from 0 to 1" in await opened.text("#problem")
        assert await opened.find("[aria-invalid]").evaluate_all("(all) => all.map(({id}) => id)") == ["places"]
        assert await opened.is_in_sight("#problem")
        assert await opened.accessibility_problems() == []
        await opened.find("#places").fill("0.2,0.3")
        assert await opened.find("#problem, [aria-invalid]").count() == 0
        assert rig.engine.requests == []


async def test_a_picture_that_is_too_large_is_not_sent(browser: Browser):
    async with faked(browser, FakeEngine(max_image_bytes=5000), has_example=False) as (rig, opened):
        await opened.find("#picture-facts", has_text="900 × 600").wait_for()
        assert await opened.text("#error") == ""
        await opened.ask("caption")
        assert "at most 5000 bytes" in await opened.text("#problem")
        assert await opened.accessibility_problems() == []
        assert (opened.uploads(), rig.engine.requests) == ([], [])


async def test_a_server_that_is_gone_is_named_as_the_cause(browser: Browser):
    async with serving_http() as rig, window(browser, origin_of(rig.server)) as opened:
        await rig.server.stop()
        await opened.ask("query", question="What bird is it?")
        await opened.has_status("Failed.")
        assert await opened.find("#error p").inner_text() == "No server answers, or the connection broke."
        opened.problems[:] = [text for text in opened.problems if "ERR_CONNECTION_REFUSED" not in text]


async def test_a_picture_that_is_none_is_refused_with_the_reason(browser: Browser, nano: Server):
    async with window(browser, origin_of(nano), refusals=(400,)) as opened:
        broken = {"name": "broken.png", "mimeType": "image/png", "buffer": DEMO_PICTURE.read_bytes()[:200]}
        await opened.find("#file").set_input_files(broken)
        await opened.ask("caption")
        await opened.has_status("Failed.")
        assert "IMAGE_DECODE_FAILED" in (await opened.find("#error").text_content() or "")


# What is kept of answers


async def test_earlier_answers_are_shown_again_with_their_pictures(browser: Browser, nano: Server):
    async with window(browser, origin_of(nano), size=PHONE) as opened:
        await opened.get_answer("detect", object="shape")
        await opened.page.get_by_role("button", name="Remove").click()
        await opened.get_answer("query", question="What is a star?")
        entries = opened.find("#entries button")
        asked = ["What is a star?", "Boxes around “shape”", EXAMPLE_QUESTION]
        assert await entries.locator("span:first-child").all_inner_texts() == asked
        await entries.nth(1).click()
        assert await opened.text("#status") == "Complete."
        assert await opened.find("#overlay rect.line").count() == 5
        assert await opened.find("#object").input_value() == "shape"
        assert await opened.find("[value=detect]").is_checked()
        assert await opened.is_in_sight("#answer li")
        assert await entries.nth(1).get_attribute("aria-current") == "true"
        assert await opened.accessibility_problems() == []
        kept = "[JSON.stringify(sessionStorage), JSON.stringify(localStorage), document.cookie]"
        assert await opened.page.evaluate(kept) == ["{}", "{}", ""]


async def test_the_drawn_picture_and_the_answer_are_saved(browser: Browser, nano: Server, tmp_path: Path):
    async with window(browser, origin_of(nano)) as opened:
        for skill, object_ in (("detect", "star"), ("point", "star"), ("segment", "yellow star")):
            await opened.get_answer(skill, object=object_)
            saved: dict[str, Path] = {}
            for button, kind in (("Save the picture", "png"), ("Save as JSON", "json")):
                async with opened.page.expect_download() as begun:
                    await opened.page.get_by_role("button", name=button).click()
                file = await begun.value
                assert file.suggested_filename == f"demo_picture-{skill}.{kind}"
                saved[kind] = tmp_path / file.suggested_filename
                await file.save_as(saved[kind])
            answer = json.loads(saved["json"].read_text(encoding="utf-8"))
            assert answer["finish_reason"] == "stop"
            with Image.open(saved["png"]) as drawn, Image.open(DEMO_PICTURE) as plain:
                assert drawn.size == plain.size
                changed = ImageChops.difference(drawn.convert("RGB"), plain.convert("RGB")).getbbox()
            assert changed is not None
            left, top, right, bottom = changed
            # What is drawn is around the star and at its label.
            assert left < STAR[0] * 900 < right
            assert top < STAR[1] * 600 < bottom
            assert right - left < 300
            assert await opened.page.get_by_role("button", name="Save the mask").is_visible() is (
                skill == "segment"
            )
        # What is shown as inside is what the mask has.
        area = opened.find("#overlay path.area")
        assert await area.evaluate("path => getComputedStyle(path).fillRule") == "nonzero"
        async with opened.page.expect_download() as begun:
            await opened.page.get_by_role("button", name="Save the mask").click()
        file = await begun.value
        assert file.suggested_filename == "demo_picture-mask.png"
        await file.save_as(tmp_path / "mask.png")
    segment = Segment(answer["path"], Box(**answer["bbox"]))
    with Image.open(tmp_path / "mask.png") as mask:
        drawn, own = (np.asarray(each.convert("L")) > 127 for each in (mask, segment.to_pil_mask(*mask.size)))
    # A path of SVG that Chromium fills agrees with the mask that the client makes.
    assert (drawn & own).sum() >= 0.98 * (drawn | own).sum()


# Tokens


async def test_a_token_is_asked_for_and_kept_in_this_tab_only(browser: Browser, tmp_path: Path):
    file = tokens_in(tmp_path, **{TOKEN: 'scopes = ["infer"]'})
    async with faked(browser, refusals=(401, 403), has_example=False, tokens=file) as (rig, opened):
        assert await opened.text("#server") == "This server asks for a token."
        assert opened.problems == []
        token = opened.page.get_by_label("Token", exact=True)
        await token.fill("wrong")
        await token.press("Tab")
        await opened.find("#error", has_text="TOKEN_INVALID").wait_for()
        await token.fill(TOKEN)
        await token.press("Tab")
        await opened.find("#server", has_text="served by").wait_for()
        await opened.has_status("Complete.")
        await opened.get_answer("query", question="What bird is it?")
        # The token may not store images, so the picture went with the request.
        assert opened.body_of_last_request()["image_url"].startswith("data:image/png;base64,")
        assert "sent with each request" in await opened.text("#picture-facts")
        await opened.screenshot("token-desktop")
        for language in ("curl", "Python", "grpcurl", "OpenAI"):
            sample = await opened.sample(language)
            assert TOKEN not in sample
            assert "KESTREL_GRPC_TOKEN" in sample
        kept = await opened.page.evaluate(
            "[JSON.stringify(sessionStorage), JSON.stringify(localStorage), document.cookie]"
        )
        assert TOKEN in kept[0]
        assert kept[1:] == ["{}", ""]
        assert rig.engine.tenants == [TOKEN, TOKEN]
        await opened.page.reload()
        await opened.has_status("Complete.")


# The picture


async def test_a_picture_is_sent_once_and_named_from_then_on(browser: Browser):
    async with faked(browser, refusals=(404,)) as (rig, opened):
        for _ in range(2):
            await opened.get_answer("query", question="What bird is it?")
        assert len(opened.uploads()) == 1
        handle = opened.body_of_last_request()["image_url"]
        assert handle.startswith("sha256:")
        # Names of stored pictures end; a file stays.
        assert handle not in await opened.sample("curl")
        # The server has dropped it.
        assert (await rig.ask(f"/v1/images/{handle}", verb="DELETE")).status == 200
        await opened.get_answer("query", question="Is it there?")
        assert len(opened.uploads()) == 2
        await opened.page.get_by_role("button", name="Delete from the server").click()
        await opened.find("#forget").wait_for(state="hidden")
        assert (await rig.ask(f"/v1/images/{handle}")).status == 404
        assert {request.images for request in rig.engine.requests} == {(DEMO_PICTURE.read_bytes(),)}
    async with faked(browser, max_stored_image_bytes=0) as (rig, opened):
        await opened.get_answer("caption")
        assert opened.uploads() == []
        assert rig.engine.requests[0].images == (DEMO_PICTURE.read_bytes(),)


async def test_pictures_are_chosen_dropped_and_pasted(browser: Browser):
    async with faked(browser) as (rig, opened):
        await opened.find("#file").set_input_files(DEMO_PICTURE)
        await opened.find("#picture-facts", has_text="demo_picture.png · 900 × 600").wait_for()
        for kind, target in (("drop", "#stage"), ("paste", "body")):
            await opened.page.get_by_role("button", name="Remove").click()
            assert await opened.find("#frame").is_hidden()
            await opened.page.evaluate(
                """async ([kind, target]) => {
                    const blob = await (await fetch("/page/example.png")).blob();
                    const data = new DataTransfer();
                    data.items.add(new File([blob], `${kind}.png`, {type: "image/png"}));
                    const options = {bubbles: true, cancelable: true, dataTransfer: data, clipboardData: data};
                    const Kind = kind === "drop" ? DragEvent : ClipboardEvent;
                    document.querySelector(target).dispatchEvent(new Kind(kind, options));
                }""",
                [kind, target],
            )
            await opened.find("#picture-facts", has_text=f"{kind}.png · 900 × 600").wait_for()
        await opened.get_answer("caption")
        assert rig.engine.requests[0].images == (DEMO_PICTURE.read_bytes(),)


async def test_a_picture_is_named_by_its_address_where_the_server_fetches_pictures(browser: Browser):
    async with faked(browser) as (_, opened):
        assert await opened.find("#address-row").is_hidden()
    async with faked(browser, refusals=(400,), image_hosts=parse_hosts("example.com")) as (_, opened):
        address = "https://pictures.example.org/birds/kestrel.jpg"
        field = opened.page.get_by_label("Or the address of a picture")
        await field.fill("kestrel.jpg")
        await field.press("Enter")
        assert "begins with https://" in await opened.text("#problem")
        await field.fill(address)
        await field.press("Enter")
        assert "server fetches this picture" in await opened.text("#not-shown")
        assert opened.requests == []
        for language in ("curl", "Python", "grpcurl", "OpenAI"):
            await opened.find("#question").fill("What bird is it?")
            assert address in await opened.sample(language)
        await opened.ask("query")
        await opened.has_status("Failed.")
        assert opened.body_of_last_request()["image_url"] == address
        assert re.search("Picture: is not on a host", await opened.text("#error"))
        assert await opened.accessibility_problems() == []


async def test_what_only_the_browser_reads_is_sent_as_jpeg(browser: Browser):
    avif = io.BytesIO()
    with Image.open(DEMO_PICTURE) as picture:
        picture.save(avif, "AVIF")
    async with faked(browser) as (rig, opened):
        # Chromium reads AVIF, and no HEIC. What a file is, its content says.
        file = {"name": "shapes.avif", "mimeType": "image/avif", "buffer": avif.getvalue()}
        await opened.find("#file").set_input_files(file)
        await opened.find("#picture-facts", has_text="shapes.avif, sent as JPEG · 900 × 600").wait_for()
        await opened.get_answer("caption")
        (request,) = rig.engine.requests
        (image,) = request.images
        assert isinstance(image, bytes)
        with Image.open(io.BytesIO(image)) as sent:
            assert (sent.format, sent.size) == ("JPEG", (900, 600))
        assert (await opened.sample("Python")).startswith("# shapes.jpg is shapes.avif as JPEG.\n")
        heic = {"name": "IMG_1.HEIC", "mimeType": "", "buffer": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"}
        await opened.find("#file").set_input_files(heic)
        await opened.find("#error", has_text="This browser cannot read HEIC files").wait_for()
        assert "shapes.avif" in await opened.text("#picture-facts")
        # The server reads TIFF, which Chromium does not.
        tiff = io.BytesIO()
        with Image.open(DEMO_PICTURE) as picture:
            picture.save(tiff, "TIFF")
        file = {"name": "shapes.tiff", "mimeType": "image/tiff", "buffer": tiff.getvalue()}
        await opened.find("#file").set_input_files(file)
        await opened.find("#not-shown", has_text="This browser cannot show the picture").wait_for()
        await opened.get_answer("detect", object="star")
        assert rig.engine.requests[1].images == (tiff.getvalue(),)
        assert await opened.find("#save-picture").is_hidden()


async def test_the_camera_takes_a_picture(browser: Browser):
    async with faked(browser) as (rig, opened):
        await opened.page.get_by_role("button", name="Camera").click()
        await opened.find("#shoot").wait_for()
        await opened.screenshot("camera-desktop")
        await opened.page.get_by_role("button", name="Take the picture").click()
        await opened.find("#picture-facts", has_text="camera.jpg").wait_for()
        assert await opened.page.evaluate("document.getElementById('video').srcObject") is None
        await opened.get_answer("query", question="What is this?")
        (image,) = rig.engine.requests[0].images
        assert isinstance(image, bytes)
        assert image.startswith(b"\xff\xd8\xff")  # a JPEG


async def test_places_are_marked_in_the_picture(browser: Browser):
    async with faked(browser) as (rig, opened):
        await opened.page.get_by_text("More settings").click()
        await opened.page.get_by_role("button", name="Mark places in the picture").click()
        await opened.find("#frame").scroll_into_view_if_needed()
        frame = await opened.find("#frame").bounding_box()
        assert frame is not None

        def at(x: float, y: float) -> tuple[float, float]:
            return frame["x"] + x * frame["width"], frame["y"] + y * frame["height"]

        await opened.page.mouse.click(*at(0.2, 0.7))
        await opened.page.mouse.move(*at(0.6, 0.9))
        await opened.page.mouse.down()
        await opened.page.mouse.move(*at(0.4, 0.6))
        await opened.page.mouse.up()
        assert await opened.find("#overlay .given").count() == 2
        await opened.get_answer("query", question="What is it?")
        point, box = opened.body_of_last_request()["spatial_refs"]
        assert point == pytest.approx([0.2, 0.7], abs=0.01)
        assert box == pytest.approx([0.4, 0.6, 0.6, 0.9], abs=0.01)
        assert len(rig.engine.requests) == 1


# Settings


async def test_constraints_sampling_and_handling_reach_the_server(browser: Browser):
    async with faked(browser) as (_, opened):
        await opened.page.get_by_text("More settings").click()
        await opened.find("#constraint").select_option("choices")
        fields = {
            "constraint-text": "yes\nno",
            "temperature": "0.5",
            "max_tokens": "5",
            "seed": "7",
            "n": "2",
            "stop-strings": "a\nb",
            "logit-bias": '{"5": -1}',
            "timeout": "30",
        }
        for name, value in fields.items():
            await opened.find(f"#{name}").fill(value)
        await opened.find("#priority").select_option("batch")
        await opened.find("#cache").select_option("bypass")
        await opened.find("#adapter").select_option("colours")
        await opened.find("#question").fill("Is it a kestrel?")
        body = json.loads(re.findall(r"<<END\n(.*)\nEND", await opened.sample("curl"), re.DOTALL)[0])
        assert body == {
            "image_url": "$PICTURE",
            "question": "Is it a kestrel?",
            "constraint": {"choices": ["yes", "no"]},
            "settings": {
                "temperature": 0.5,
                "max_tokens": 5,
                "seed": 7,
                "n": 2,
                "stop": ["a", "b"],
                "logit_bias": {"5": -1},
            },
            "priority": "batch",
            "cache": "bypass",
            "model": "fake/colours",
        }
        await opened.screenshot("more-desktop")
        assert await opened.accessibility_problems() == []


async def test_several_samples_are_shown(browser: Browser):
    async with faked(browser) as (_, opened):
        await opened.page.get_by_text("More settings").click()
        await opened.find("#n").fill("2")
        await opened.get_answer("query", question="What bird is it?")
        assert await opened.find("#answer li").all_inner_texts() == ["a kestrel", "a kestrel"]


async def test_an_adapter_answers(browser: Browser, nano: Server):
    async with window(browser, origin_of(nano)) as opened:
        await opened.page.get_by_text("More settings").click()
        await opened.find("#adapter").select_option("gold")
        await opened.get_answer("query", question="What color is the star?", temperature="0")
        assert await opened.text("#answer") == "gold"


# Further questions


def last_chat(rig: HttpServing) -> Chat:
    """The last conversation that reached the engine."""
    request = rig.engine.requests[-1]
    assert isinstance(request, Chat)
    return request


def said_last(rig: HttpServing) -> list[str]:
    """The texts of the last conversation that reached the engine."""
    return [message.text for message in last_chat(rig).messages]


async def test_a_further_question_has_the_conversation_and_the_picture(browser: Browser):
    async with faked(browser) as (rig, opened):
        page = opened.page
        await page.locator("#more summary").click()
        await opened.get_answer("query", question="What is it?", temperature="0", places="0.5,0.5")
        for further in ("Which one?", "Why?"):
            await page.get_by_label("A further question").fill(further)
            await page.get_by_role("button", name="Ask further").click()
            await page.locator("#asked", has_text=further).wait_for()
            await opened.has_status("Complete.")
        assert await opened.text("#answer") == "a kestrel"
        assert (await opened.text("#turns")).split("\n") == ["What is it?", "a kestrel", "Which one?", "a kestrel"]
        assert await opened.accessibility_problems() == []
        _, second, third = rig.engine.requests
        assert isinstance(second, Chat)
        assert isinstance(third, Chat)
        assert [(message.role.value, message.text) for message in third.messages] == [
            ("user", "What is it?"),
            ("assistant", "a kestrel"),
            ("user", "Which one?"),
            ("assistant", "a kestrel"),
            ("user", "Why?"),
        ]
        for request in (second, third):
            assert request.messages[0].images == (DEMO_PICTURE.read_bytes(),)
            assert request.images == request.messages[0].images
            assert request.sampling.temperature == 0.0
        assert len(opened.uploads()) == 1

        # Earlier turns can be shown again, and asked about in another way.
        await page.locator("#entries button").nth(2).click()
        assert await page.locator("#turns").is_hidden()
        await page.get_by_label("A further question").fill("Where?")
        await page.keyboard.press("Enter")
        await page.locator("#asked", has_text="Where?").wait_for()
        await opened.has_status("Complete.")
        assert said_last(rig) == ["What is it?", "a kestrel", "Where?"]


async def test_a_further_question_adds_a_picture(browser: Browser):
    async with faked(browser) as (rig, opened):
        page = opened.page
        await opened.get_answer("query", question="What is it?")
        chooser = page.locator("#further-file")
        for name in ("left_out.png", "second.png"):
            await chooser.set_input_files({"name": name, "mimeType": "image/png", "buffer": SECOND})
            await page.locator("#added-name", has_text=name).wait_for()
            assert await page.get_by_alt_text(f"The added picture, {name}").is_visible()
            if name == "left_out.png":
                await page.get_by_role("button", name="Leave it out").click()
                assert await page.locator("#added-picture").is_hidden()
        await page.get_by_label("A further question").fill("And this?")
        await page.get_by_role("button", name="Ask further").click()
        await page.locator("#asked", has_text="And this?").wait_for()
        await opened.has_status("Complete.")
        assert await page.locator("#asked-picture").is_visible()
        assert await page.locator("#added-picture").is_hidden()
        assert await opened.accessibility_problems() == []
        request = last_chat(rig)
        assert [message.images for message in request.messages] == [(DEMO_PICTURE.read_bytes(),), (), (SECOND,)]

        # The picture stays with its question, also in turns that add none, and is sent once.
        await page.get_by_label("A further question").fill("Why?")
        await page.keyboard.press("Enter")
        await page.locator("#asked", has_text="Why?").wait_for()
        await opened.has_status("Complete.")
        assert await page.locator("#turns img:visible").count() == 1
        assert await page.locator("#asked-picture").is_hidden()
        request = last_chat(rig)
        assert [len(message.images) for message in request.messages] == [1, 0, 1, 0, 0]
        assert len(opened.uploads()) == 2
        await page.locator("#entries button").nth(1).click()
        assert await page.locator("#asked-picture").is_visible()
        assert await page.locator("#asked-picture").evaluate(
            "(image) => image.decode().then(() => image.naturalWidth)"
        )


async def test_a_file_that_is_no_picture_and_one_that_is_too_large_are_not_added(browser: Browser):
    engine = FakeEngine()
    engine.info = replace(engine.info, config=replace(engine.info.config, max_image_bytes=60_000))
    async with faked(browser, engine) as (rig, opened):
        chooser = opened.find("#further-file")
        await chooser.set_input_files({"name": "notes.txt", "mimeType": "text/plain", "buffer": b"notes"})
        await opened.find("#error", has_text="notes.txt").wait_for()
        large = SECOND + bytes(60_000)
        await chooser.set_input_files({"name": "large.png", "mimeType": "image/png", "buffer": large})
        await opened.find("#added-name", has_text="large.png").wait_for()
        await opened.page.get_by_label("A further question").fill("And this?")
        await opened.page.keyboard.press("Enter")
        assert await opened.text("#problem") == "The picture may have at most 60000 bytes."
        assert rig.engine.requests == []


async def test_only_answers_in_text_have_further_questions(browser: Browser):
    async with faked(browser) as (rig, opened):
        follow = opened.find("#follow")
        await opened.find("#more summary").click()
        for skill, fields in (("caption", {}), ("detect", {"object": "bird"}), ("query", {"n": "2"})):
            await opened.get_answer(skill, **fields)
            assert await follow.is_hidden(), skill
        await opened.get_answer("query", n="")
        await opened.page.get_by_role("button", name="Ask further").click()
        assert await opened.text("#problem") == "Write a question."
        assert len(rig.engine.requests) == 5
        await opened.choose("point")
        assert await follow.is_hidden()
    async with faked(browser, FakeEngine(skills=("query", "caption"))) as (_, opened):
        await opened.get_answer("query", question="What is it?")
        assert await opened.find("#follow").is_hidden()


async def test_a_further_question_that_is_refused_can_be_asked_again(browser: Browser):
    refusals: list[object] = [Overloaded(7, 0.25)]

    def refusing(request: Any) -> list[Any]:
        return [refusals.pop()] if isinstance(request, Chat) and refusals else list(answers(request))

    async with faked(browser, FakeEngine(refusing), refusals=(429,)) as (rig, opened):
        await opened.get_answer("query", question="What is it?")
        await opened.page.get_by_label("A further question").fill("Why?")
        await opened.page.get_by_role("button", name="Ask further").click()
        await opened.page.get_by_role("button", name="Try again").click()
        await opened.has_status("Complete.")
        assert await opened.text("#answer") == "a kestrel"
        assert said_last(rig) == ["What is it?", "a kestrel", "Why?"]


async def test_the_built_in_model_answers_a_further_question(browser: Browser, nano: Server):
    async with window(browser, origin_of(nano)) as opened:
        await opened.page.get_by_label("A further question").fill("What color is the square?")
        await opened.page.get_by_role("button", name="Ask further").click()
        await opened.find("#asked", has_text="square").wait_for()
        await opened.has_status("Complete.")
        assert await opened.text("#answer")


# The same request as code

LANGUAGES = ("curl", "Python", "grpcurl")
ASKED = {
    "query": ({"question": "What color is the star? $HOME \"`'"}, "yellow"),
    "caption": ({}, "star"),
    "point": ({"object": "star"}, "0.2"),
    "detect": ({"object": "star"}, "0.1"),
    "segment": ({"object": "yellow star"}, "M"),
    "gaze": ({"eye-x": "0.5", "eye-y": "0.5"}, ""),
}


async def run(sample: str, language: str, folder: Path) -> str:
    """What a sample prints, for a reader with the picture in this folder."""
    interpreter = {
        "Python": (sys.executable, "-c"),
        "OpenAI": (str(ENVIRONMENTS / "openai" / "bin" / "python"), "-c"),
    }.get(language, ("bash", "-euc"))
    process = await asyncio.create_subprocess_exec(
        *interpreter,
        sample,
        cwd=folder,
        env=ACTIVATED,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, complaints = await process.communicate()
    assert process.returncode == 0, f"{sample}\n{out.decode()}\n{complaints.decode()}"
    return out.decode()


async def test_the_request_as_code_does_the_same(browser: Browser, nano: Server, tmp_path: Path):
    name = "demo_picture.png"
    (tmp_path / name).write_bytes(DEMO_PICTURE.read_bytes())
    async with window(browser, origin_of(nano)) as opened:
        facts = await opened.page.evaluate("fetch('/page/server.json').then((response) => response.json())")
        offered = [skill for skill in ASKED if skill in facts["skills"]]
        assert len(offered) >= 5
        samples: dict[tuple[str, str], str] = {}
        for skill in offered:
            await opened.choose(skill)
            fields, _ = ASKED[skill]
            for control, text in fields.items():
                await opened.find(f"#{control}").fill(text)
            for language in LANGUAGES:
                samples[skill, language] = await opened.sample(language)
        printed = await asyncio.gather(*(run(text, key[1], tmp_path) for key, text in samples.items()))
        for (skill, language), shown in zip(samples, printed, strict=True):
            assert ASKED[skill][1] in shown, (skill, language, shown)
            assert name in samples[skill, language]


async def test_a_conversation_as_code_does_the_same(browser: Browser, nano: Server, tmp_path: Path):
    (client,) = (item for item in CLIENTS if item.name == "openai")
    await asyncio.to_thread(install, client, ENVIRONMENTS / client.name)
    for name, data in (("demo_picture.png", DEMO_PICTURE.read_bytes()), ("it's second.png", SECOND)):
        (tmp_path / name).write_bytes(data)
    async with window(browser, origin_of(nano)) as opened:
        await opened.page.get_by_text("More settings").click()
        await opened.get_answer("query", temperature="0", max_tokens="12")
        file = {"name": "it's second.png", "mimeType": "image/png", "buffer": SECOND}
        await opened.find("#further-file").set_input_files(file)
        await opened.find("#added-name", has_text="second").wait_for()
        await opened.page.get_by_label("A further question").fill("What color is the square? $HOME \"`'")
        await opened.page.get_by_role("button", name="Ask further").click()
        await opened.find("#asked", has_text="square").wait_for()
        await opened.has_status("Complete.")
        answer = (await opened.text("#answer")).strip()
        samples = {language: await opened.sample(language) for language in (*LANGUAGES, "OpenAI")}
        for language, text in samples.items():
            assert (text.count("demo_picture.png"), text.count("second.png")) == (1, 1), language
        printed = await asyncio.gather(*(run(text, language, tmp_path) for language, text in samples.items()))
        for language, shown in zip(samples, printed, strict=True):
            assert json.dumps(answer)[1:-1] in shown or answer in shown, (language, shown)
        # What the form holds is shown again once it is changed.
        await opened.find("#question").fill("How many shapes are there?")
        assert "How many shapes are there?" in await opened.sample("Python")


async def test_the_code_has_what_was_chosen_and_nothing_else(browser: Browser):
    async with faked(browser) as (rig, opened):
        assert await opened.sample("curl") == (
            """PICTURE="data:image/png;base64,$(base64 < 'demo_picture.png' | tr -d '\\n')"\n"""
            f"curl -s {origin_of(rig.server)}/v1/query -H 'content-type: application/json' -d @- <<END\n"
            '{\n  "image_url": "$PICTURE",\n  "question": "What color is the star?"\n}\nEND\n'
        )
        assert await opened.sample("Python") == (
            "from kestrel_client import Client\n\n"
            f'with Client("localhost:{rig.server.port}") as client:\n'
            '    result = client.complete_query("demo_picture.png", "What color is the star?")\n'
            "    print(result.answer)\n"
        )


async def test_the_request_for_the_client_of_openai_does_the_same(browser: Browser, nano: Server, tmp_path: Path):
    (client,) = (item for item in CLIENTS if item.name == "openai")
    await asyncio.to_thread(install, client, ENVIRONMENTS / client.name)
    (tmp_path / "demo_picture.png").write_bytes(DEMO_PICTURE.read_bytes())
    async with window(browser, origin_of(nano)) as opened:
        await opened.page.get_by_text("More settings").click()
        await opened.find("#constraint").select_option("choices")
        await opened.find("#constraint-text").fill("yellow\nblue")
        await opened.find("#question").fill("What color is the star?")
        one = await opened.sample("OpenAI")
        await opened.find("#n").fill("2")
        two = await opened.sample("OpenAI")
        assert (await run(one, "OpenAI", tmp_path)).strip() == "yellow"
        assert (await run(two, "OpenAI", tmp_path)).split() == ["yellow", "yellow"]


# Without a mouse, and without eyes


_FOCUSED = "[document.activeElement].map((item) => item.id || item.value || item.tagName)[0]"


async def test_everything_is_reached_by_the_keyboard_in_the_order_of_reading(browser: Browser):
    async with faked(browser) as (_, opened):
        reached: list[str] = []
        for _ in range(19):
            await opened.page.keyboard.press("Tab")
            reached.append(await opened.page.evaluate(_FOCUSED))
        assert reached == [
            *(
                "remove",
                "further",
                "ask-further",
                "add-picture",
                "save-json",
                "SUMMARY",
                "choose",
                "camera",
                "example",
            ),
            *("query", "question", "reasoning", "ask", "SUMMARY", "SUMMARY", "BUTTON"),
            *("curl", "sample", "copy"),
        ]
        await opened.page.get_by_role("button", name="Remove").focus()
        await opened.page.keyboard.press("Enter")
        assert await opened.find("#frame").is_hidden()
        await opened.find("#example").focus()
        await opened.page.keyboard.press("Enter")
        await opened.has_status("Complete.")
        await opened.find("[value=query]").focus()
        for _ in range(2):
            await opened.page.keyboard.press("ArrowRight")
        await opened.page.keyboard.press("Tab")
        await opened.page.keyboard.press("Enter")
        await opened.has_status("Complete.")
        assert await opened.find("#overlay circle").count() > 0


async def test_a_screen_reader_finds_names_and_is_told_what_changes(browser: Browser):
    async with faked(browser) as (_, opened):
        for role in ("heading", "radio", "button", "textbox"):
            for element in await opened.page.get_by_role(role).all():
                assert await element.evaluate(
                    "(item) => Boolean(item.textContent.trim() || item.labels?.length || item.ariaLabel)"
                )
        live = await opened.find("[aria-live], [role=status], [role=alert]").evaluate_all(
            "(elements) => elements.map((element) => element.id)"
        )
        assert set(live) >= {"answer", "status", "error", "picture-facts", "copied"}


async def test_the_request_is_copied(browser: Browser):
    async with faked(browser) as (_, opened):
        await opened.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        await opened.find("#question").fill("What bird is it?")
        await opened.page.get_by_role("button", name="Copy").click()
        await opened.find("#copied", has_text="Copied.").wait_for()
        assert await opened.page.evaluate("navigator.clipboard.readText()") == await opened.text("#sample-text")
