"""Tells MkDocs which pages the documentation site has.

The site has the layout of the repository, so that the links between pages are right in both. Its pages are
README.md, all pages in docs/, and what these link to elsewhere in the repository: further pages, and other files,
each as a page that shows it. Two pages are made here: the REST API, from the document that a server sends, and the
Python client, whose docstrings mkdocstrings adds.
"""

import ast
import asyncio
import io
import json
import posixpath
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.request import urlopen

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from kestrel_grpc.config.options import ServerConfig
from kestrel_grpc.server import Server
from kestrel_runtime.engine.engine import LocalEngine
from tools.site.rest_page import rest_page

_LINK = re.compile(r'(\]\(|<img src=")([^)\s#"]+)')
_CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_ITEM = re.compile(r"(?:[-*]|\d\.) ")
_MEDIA = {".png", ".webp", ".svg"}
_LANGUAGES = {".py": "python", ".cpp": "cpp", ".go": "go", ".java": "java", ".json": "json", ".ts": "typescript"}
"""The language for highlighting, by file ending; other files are plain text."""
_SECTIONS = {
    "Client": ("client", "blocking_calls"),
    "Asyncio": ("aio", "async_calls"),
    "Images": ("images",),
    "Requests": ("requests",),
    "Results": ("results",),
    "Many calls": ("batches",),
    "Frames": ("blocking_frames", "async_frames"),
    "Drawing": ("drawing",),
    "Errors": ("errors",),
}
"""The modules of the Python client, in the order in which people need them."""


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Returns all files of the site."""
    root = _root(config)
    site = Files([file for file in files if file.src_dir != config.docs_dir])  # those of the theme
    pages = ["README.md", *(path.relative_to(root).as_posix() for path in sorted((root / "docs").rglob("*.md")))]
    linked = [path for path in _reached(root, pages) if path not in pages]
    for path in pages:
        site.append(_copied(path, config, InclusionLevel.UNDEFINED))
    for path in linked:
        if _is_shown(path):
            site.append(_made(f"{path}.md", _shown(root / path, path), config, InclusionLevel.NOT_IN_NAV))
        else:
            site.append(_copied(path, config, InclusionLevel.NOT_IN_NAV))
    document = asyncio.run(_openapi_document())
    site.append(_made("docs/openapi.json", json.dumps(document, indent=2), config, InclusionLevel.NOT_IN_NAV))
    site.append(_made("docs/rest_api.md", rest_page(document), config, InclusionLevel.UNDEFINED))
    client = root / "clients" / "python" / "kestrel_client" / "__init__.py"
    site.append(_made("docs/python_api.md", _python_page(client), config, InclusionLevel.UNDEFINED))
    return site


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Redirects links to files to the pages that show these files; MkDocs resolves all other links."""

    def to_site(match: re.Match[str]) -> str:
        before, link = match.groups()
        path = _target(page.file.src_uri, link)
        if before.startswith("<img"):  # MkDocs does not look into HTML
            picture = files.get_file_from_path(path)
            return match[0] if picture is None else before + picture.url_relative_to(page.file)
        return f"{before}{link}.md" if files.get_file_from_path(f"{path}.md") is not None else match[0]

    return _with_lists(_LINK.sub(to_site, markdown))


def _with_lists(markdown: str) -> str:
    """Indents the text of list items by four spaces, since Python-Markdown ignores text behind two or three.

    An item with several paragraphs is followed by an empty line, without which Python-Markdown loses the next item.
    """
    parts = _CODE.split(markdown)
    for number in range(0, len(parts), 2):
        width, has_paragraphs, lines = 4, False, parts[number].split("\n")
        for index, line in enumerate(lines):
            item = _ITEM.match(line)
            if item is not None:
                lines[index] = f"\n{line}" if has_paragraphs else line
                width, has_paragraphs = len(item[0]), False
            elif line.startswith(" " * width):
                lines[index] = " " * (4 - width) + line
                has_paragraphs = has_paragraphs or lines[index - 1] == ""
            elif line and not line.startswith(" "):
                width, has_paragraphs = 4, False
        parts[number] = "\n".join(lines)
    return "".join(parts)


def _root(config: MkDocsConfig) -> Path:
    assert config.config_file_path is not None
    return Path(config.config_file_path).resolve().parent


def _reached(root: Path, pages: list[str]) -> list[str]:
    """Returns `pages` and the paths of all files that these and further pages link to."""
    found: list[str] = []
    waiting = list(pages)
    while waiting:
        path = waiting.pop(0)
        if path in found:
            continue
        found.append(path)
        if path.endswith(".md"):
            waiting += _linked(root, path)
    return found


def _linked(root: Path, page: str) -> Iterator[str]:
    for _, link in _LINK.findall((root / page).read_text(encoding="utf-8")):
        path = _target(page, link)
        if (root / path).is_file():
            yield path


def _target(page: str, link: str) -> str:
    """Returns the path in the repository that a relative link leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def _is_shown(path: str) -> bool:
    return PurePosixPath(path).suffix not in {".md", *_MEDIA}


def _shown(file: Path, path: str) -> str:
    """Returns a page that shows a file. The search skips it, since a file is data rather than documentation."""
    fence = "`" * 6
    text = file.read_text(encoding="utf-8").rstrip()
    language = _LANGUAGES.get(file.suffix, "text")
    return f"---\nsearch: {{exclude: true}}\n---\n\n# {path}\n\n{fence}{language}\n{text}\n{fence}\n"


def _copied(path: str, config: MkDocsConfig, inclusion: InclusionLevel) -> File:
    return File(
        path,
        str(_root(config)),
        config.site_dir,
        config.use_directory_urls,
        dest_uri=_destination(path),
        inclusion=inclusion,
    )


def _made(path: str, content: str, config: MkDocsConfig, inclusion: InclusionLevel) -> File:
    file = File.generated(config, path, content=content, inclusion=inclusion)
    file.dest_uri = _destination(path)
    return file


def _destination(path: str) -> str:
    """Returns the place of a file in the site: docs/ is its root, and each page is a folder."""
    name = PurePosixPath(path.removeprefix("docs/"))
    if name.suffix != ".md":
        return str(name)
    return str((name.parent if name.name == "README.md" else name.with_suffix("")) / "index.html")


async def _openapi_document() -> Any:
    """Returns the document that a server of the built-in model sends, one that stores images."""
    config = ServerConfig(port=0, http_port=0)
    with redirect_stdout(io.StringIO()):  # it prints its addresses
        engine = await asyncio.to_thread(LocalEngine.start, config.engine_config())
        async with Server(engine, config) as server:
            address = f"http://127.0.0.1:{server.http_port}/openapi.json"
            document = json.loads(await asyncio.to_thread(lambda: urlopen(address).read()))
    del document["info"]["description"]  # names the model of that server
    return document


def _python_page(package: Path) -> str:
    """Returns a page that names everything the client exports; mkdocstrings fills it."""
    exported: dict[str, list[str]] = {}
    for node in ast.parse(package.read_text(encoding="utf-8")).body:
        if (
            isinstance(node, ast.ImportFrom)
            and node.module is not None
            and node.module.startswith("kestrel_client.")
        ):
            names = [alias.name for alias in node.names]
            exported[node.module.removeprefix("kestrel_client.")] = names
    lines = ["# The Python API", "", "All that `kestrel_client` exports. [The client](../clients/python/README.md)"]
    lines += ["describes how to use it.", ""]
    for title, modules in _SECTIONS.items():
        lines += [f"## {title}", ""]
        for module in modules:
            for name in exported.pop(module):
                lines += [f"::: kestrel_client.{name}", ""]
    assert not exported, f"modules that no section has: {', '.join(exported)}"
    return "\n".join(lines)
