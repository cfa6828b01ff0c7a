"""What `make docs` has built: links lead somewhere, nothing comes from other hosts, and nothing is missing."""

import json
import posixpath
import re
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

import kestrel_client
from kestrel_client.v1 import engine_service_pb2, image_service_pb2, vision_service_pb2

CHECKOUT = Path(__file__).resolve().parent.parent.parent
SITE = CHECKOUT / "build" / "site"
PAGES = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html") if path.name != "404.html")
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "object": "data"}
"""What a browser loads by itself, by element and attribute."""


@dataclass
class Parsed(HTMLParser):
    """What a page has of links and places to link to."""

    links: list[str] = field(default_factory=list[str])
    loaded: list[str] = field(default_factory=list[str])
    ids: set[str] = field(default_factory=set[str])
    text: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids |= {value for name in ("id", "name") if (value := found.get(name))}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"] or "")
        if tag in LOADED and found.get(LOADED[tag]):
            self.loaded.append(found[LOADED[tag]] or "")

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@cache
def parsed(page: str) -> Parsed:
    reader = Parsed()
    reader.feed((SITE / page).read_text(encoding="utf-8"))
    return reader


def broken(page: str, links: list[str]) -> list[str]:
    """The links within the site that lead nowhere."""
    found: list[str] = []
    for link in links:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        path = (
            posixpath.normpath(posixpath.join(posixpath.dirname(page), unquote(parts.path))) if parts.path else page
        )
        target = path if (SITE / path).is_file() else posixpath.normpath(posixpath.join(path, "index.html"))
        if not (SITE / target).is_file() or (
            parts.fragment and target.endswith(".html") and unquote(parts.fragment) not in parsed(target).ids
        ):
            found.append(link)
    return found


def test_every_link_and_every_place_in_a_page_exists():
    assert len(PAGES) > 30
    assert {page: missing for page in PAGES if (missing := broken(page, parsed(page).links))} == {}


def test_browsers_load_nothing_from_other_hosts():
    for page in PAGES:
        foreign = [link for link in parsed(page).loaded if urlsplit(link).scheme or urlsplit(link).netloc]
        assert foreign == [], page
        assert broken(page, parsed(page).loaded) == [], page
    for sheet in SITE.rglob("*.css"):
        assert not re.search(r"(url\(|@import\s*)[\"']?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet


def test_the_page_of_the_rest_api_has_every_route_and_field():
    document = json.loads((SITE / "openapi.json").read_text(encoding="utf-8"))
    text = "".join(parsed("rest_api/index.html").text)
    assert len(document["paths"]) > 8
    for path, operations in document["paths"].items():
        assert all(f"{verb.upper()} {path}" in text for verb in operations)
    for name, schema in document["components"]["schemas"].items():
        assert all(item in text for item in schema["properties"]), name


def test_the_page_of_the_python_client_has_everything_that_is_exported():
    places = parsed("python_api/index.html").ids
    assert [name for name in kestrel_client.__all__ if f"kestrel_client.{name}" not in places] == []
    methods = [name for name in vars(kestrel_client.Client) if not name.startswith("_")]
    assert len(methods) > 15
    assert [name for name in methods if f"kestrel_client.Client.{name}" not in places] == []


@pytest.mark.parametrize("contract", [vision_service_pb2, image_service_pb2, engine_service_pb2])
def test_the_page_of_the_contract_has_every_call(contract):
    text = "".join(parsed("api/index.html").text)
    for service in contract.DESCRIPTOR.services_by_name.values():
        assert all(f"{method.name}" in text for method in service.methods)


def test_the_search_finds_every_page_of_the_navigation():
    index = json.loads((SITE / "search" / "search_index.json").read_text(encoding="utf-8"))
    found = {item["location"].partition("#")[0] for item in index["docs"]}
    shown = {posixpath.dirname(page) + "/" if "/" in page else "" for page in PAGES}
    files = {page for page in shown if re.search(r"\.\w+/$", page)}  # pages that show a file
    assert shown - files <= found
    assert not files & found


def test_every_page_of_the_navigation_is_in_the_header_of_the_first():
    listed = (CHECKOUT / "mkdocs.yml").read_text(encoding="utf-8")
    entries = str(yaml.safe_load(listed)["nav"])
    links = set(parsed("index.html").links)
    for page in re.findall(r"'([\w/]+)\.md'", entries):
        name = page.removeprefix("docs/").removesuffix("README")
        assert f"{name.rstrip('/')}/" in links or name == "", page
