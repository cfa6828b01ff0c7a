"""The page's files and what they may do, and which requests of browsers the HTTP port answers because of it."""

import asyncio
import re
import ssl
from importlib.resources import files
from pathlib import Path

import trustme

from kestrel_grpc.images.image_uris import parse_hosts
from tests.fakes import FakeEngine
from tests.server.certificates import Pair
from tests.server.frontends.http.test_frontend import bearer, tokens_in
from tests.server.http_calls import Connection, HttpServing, serving_http

QUERY = {"question": "?"}
STATIC = files("kestrel_grpc.frontends.web_ui").joinpath("static")
MAX_WEIGHT_BYTES = 200_000


def path_of(name: str) -> str:
    return "/" if name == "index.html" else f"/page/{name}"


def text_of(name: str) -> str:
    return STATIC.joinpath(name).read_text(encoding="utf-8")


NAMES = sorted(item.name for item in STATIC.iterdir())


async def test_the_page_and_its_files_are_served_with_a_strict_policy():
    async with serving_http() as rig:
        for name in NAMES:
            response = await rig.ask(path_of(name))
            assert (response.status, response.body) == (200, STATIC.joinpath(name).read_bytes()), name
            policy = response.headers["content-security-policy"].split("; ")
            assert {"default-src 'none'", "script-src 'self'", "connect-src 'self'"} <= set(policy)
            assert "frame-ancestors 'none'" in policy
            assert "unsafe" not in response.headers["content-security-policy"]
            assert response.headers["x-content-type-options"] == "nosniff"
            assert response.headers["referrer-policy"] == "same-origin"
        assert (await rig.ask("/")).headers["content-type"] == "text/html; charset=utf-8"
        assert (await rig.ask("/page/app.js")).headers["content-type"] == "text/javascript; charset=utf-8"
        assert (await rig.ask("/page/example.png")).headers["content-type"] == "image/png"


async def test_a_file_that_the_browser_has_is_not_sent_again():
    async with serving_http() as rig, rig.connect() as connection:
        first = await rig.ask("/page/app.js")
        assert first.headers["cache-control"] == "no-cache"
        tag = first.headers["etag"]
        for known in (tag, f"W/{tag}", f'"other", {tag}'):
            await connection.send("/page/app.js", headers={"If-None-Match": known})
            status, headers = await connection.head()
            assert (status, headers["etag"]) == (304, tag)
            assert "content-length" not in headers
        await connection.send("/page/app.js", headers={"If-None-Match": '"other"'})
        assert (await connection.response()).body == first.body


async def test_the_files_are_for_reading_only():
    async with serving_http() as rig, rig.connect() as connection:
        await connection.send("/", verb="HEAD")
        status, headers = await connection.head()
        assert (status, headers["content-length"]) == (200, str(len(text_of("index.html").encode())))
        await connection.send("/page/app.js", {})
        refused = await connection.response()
        assert (refused.status, refused.headers["allow"]) == (405, "GET, HEAD")
        await connection.send("/page/../server.py")
        assert (await connection.response()).status == 404


async def test_without_the_page_there_are_no_files_and_no_pages_that_may_call():
    async with serving_http(page=False) as rig:
        for path in ("/", "/page/app.js", "/page/server.json", "/page/access.json"):
            assert (await rig.ask(path)).status == 404
        refused = await rig.ask("/v1/query", QUERY, headers=of_page(rig, "localhost"))
        assert (refused.status, refused.json["error"]["code"]) == (403, "SOURCE_NOT_ALLOWED")


async def test_the_page_tells_what_the_server_offers():
    async with serving_http(FakeEngine(skills=("query", "detect"))) as rig:
        facts = (await rig.ask("/page/server.json")).json
        assert facts["skills"] == {
            "query": {"temperature": 0.2, "top_p": 0.9, "max_tokens": 768},
            "detect": {"temperature": 0.0, "top_p": 1.0, "max_objects": 150},
        }
        assert (facts["model"], facts["adapters"]) == ("fake", ["colours", "shapes@200"])
        assert facts["grpc_port"] == rig.server.port
        assert (facts["is_encrypted"], facts["stores_images"]) == (False, True)
    async with serving_http(max_stored_image_bytes=0) as rig:
        facts = (await rig.ask("/page/server.json")).json
        assert (facts["stores_images"], facts["fetches_images"]) == (False, False)
    async with serving_http(image_hosts=parse_hosts("example.com")) as rig:
        assert (await rig.ask("/page/server.json")).json["fetches_images"] is True


async def test_the_files_need_no_token_and_what_they_ask_for_does(tmp_path: Path):
    file = tokens_in(tmp_path, alice='scopes = ["infer"]', bob='scopes = ["images"]')
    async with serving_http(tokens=file) as rig:
        for name in NAMES:
            assert (await rig.ask(path_of(name))).status == 200
        assert (await rig.ask("/page/access.json")).json == {"asks_for_tokens": True}
        assert (await rig.ask("/page/server.json")).status == 401
        for name in ("alice", "bob"):
            assert (await rig.ask("/page/server.json", headers=bearer(name))).status == 200
        page = of_page(rig, "kestrel.example.com")
        assert (await rig.ask("/v1/query", QUERY, headers=page)).status == 401
        assert (await rig.ask("/v1/query", QUERY, headers={**page, **bearer("alice")})).status == 200
    async with serving_http() as rig:
        assert (await rig.ask("/page/access.json")).json == {"asks_for_tokens": False}


def of_page(rig: HttpServing, host: str, *, port: int | None = None) -> dict[str, str]:
    """The headers of a request of a page that `port` of `host` has served, to the server at the same name."""
    return {
        "Host": f"{host}:{rig.server.http_port}",
        "Origin": f"http://{host}:{port or rig.server.http_port}",
        "Sec-Fetch-Site": "same-origin" if port is None else "same-site",
    }


async def test_requests_of_the_page_itself_are_answered():
    for origins in (None, ("https://good.example",)):
        async with serving_http(http_hosts=("kestrel.lan",), http_origins=origins) as rig:
            for host in ("localhost", "127.0.0.1", "kestrel.lan"):
                assert (await rig.ask("/v1/query", QUERY, headers=of_page(rig, host))).status == 200


async def test_the_origin_of_the_page_has_the_scheme_of_the_connection(tmp_path: Path):
    pair, authority = Pair.within(tmp_path), trustme.CA()
    pair.write(authority)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    async with serving_http(tls_certificate=str(pair.certificate), tls_key=str(pair.key)) as rig:
        host = f"127.0.0.1:{rig.server.http_port}"
        for scheme, status in (("https", 200), ("http", 403)):
            streams = await asyncio.open_connection("127.0.0.1", rig.server.http_port, ssl=context)
            connection = Connection(*streams)
            await connection.send("/v1/query", QUERY, headers={"Host": host, "Origin": f"{scheme}://{host}"})
            assert (await connection.response()).status == status
            connection.writer.close()


async def test_requests_of_other_pages_are_refused():
    async with serving_http() as rig:
        others = {
            "another server of this machine": of_page(rig, "localhost", port=3000),
            "another site": {**of_page(rig, "localhost"), "Origin": "https://evil.example"},
            "a site whose name stands for this machine": of_page(rig, "evil.example"),
        }
        for source, headers in others.items():
            refused = await rig.ask("/v1/query", QUERY, headers=headers)
            assert (refused.status, refused.json["error"]["code"]) == (403, "SOURCE_NOT_ALLOWED"), source
        assert (await rig.ask("/", headers={"Host": "evil.example"})).status == 403
        assert rig.engine.requests == []


def test_the_page_is_light():
    example = files("kestrel_grpc").joinpath("demo_picture.png").read_bytes()
    weight = sum(len(STATIC.joinpath(name).read_bytes()) for name in NAMES) + len(example)
    assert weight < MAX_WEIGHT_BYTES


async def test_the_page_loads_nothing_from_elsewhere():
    named: set[str] = set()
    for name in NAMES:
        text = text_of(name)
        named.update(re.findall(r'\b(?:src|href)="([^"]+)"', text))
        named.update(re.findall(r'\bfetch\("([^"]+)"', text))
        named.update(
            path.replace("./", "/page/") for path in re.findall(r'^import .* from "([^"]+)";$', text, re.M)
        )
        assert "url(" not in text or not name.endswith(".css")
        assert "@import" not in text
        # A namespace is a name and is not fetched.
        assert re.findall(r"\bhttps?://[a-z]\S*", text.replace("http://www.w3.org/2000/svg", "")) == []
    assert {"/page/app.js", "/page/style.css", "/page/form.js", "/page/example.png"} <= named
    async with serving_http() as rig:
        for path in named:
            assert path.startswith("/v1/") or (await rig.ask(path)).status == 200, path
