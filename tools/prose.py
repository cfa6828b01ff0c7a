"""Finds the prose of modules: docstrings, comments and names, and what in them has no place there.

python -m tools.prose [PACKAGE…]    # prints each fragment and each refused word of the product, with its place
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence

from tools.source import CHECKOUT, Module, product_modules

FRAGMENT = re.compile(
    r"(Of|What|As|Those|That|Whether|Where|Who|Which|How|When|For|In|From|By|At|With|Without|Beside|No|Nothing)\b"
)
"""Matches docstrings whose first word begins no sentence."""
REFUSED = {
    r"besides?": "next to, in addition to",
    r"nobody|newcomers?": "no caller, no process; a new request",
    r"lanes?": "stream, worker, gate; only kernels have lanes, those of a warp",
    r"come(?:s|ing)? to|came to": "is, equals, amounts to",
    r"judg\w*|evidence|acquit\w*|witness\w*|forg[ai]v\w*": "decide, measure; runs in flight; clear, reset",
    r"mend(?:s|ed|ing)?": "repair",
    r"tell(?:s|ing)?|told": "log, report, say, distinguish",
    r"widen(?:s|ed|ing)?": "dequantise, convert",
}
"""What to write instead of each word."""
_WORDS = re.compile(rf"\b(?:{'|'.join(REFUSED)})\b", re.IGNORECASE)
# A term of the hardware, and an algorithm of a standard.
_TERMS = {"kestrel_ops": re.compile(r"\blanes?\b", re.IGNORECASE)}
_NAMED = re.compile(r"forgiving-base64")


def docstrings(module: Module) -> Iterator[tuple[int, str]]:
    """Yields each string that documents a module, class, function or field, with its line."""
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for statement in node.body:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                text = statement.value.value
                if isinstance(text, str) and text.strip():
                    yield statement.lineno, text.strip()


def comments(module: Module) -> Iterator[tuple[int, str]]:
    """Yields each block of comments as one text, with the line that it ends in."""
    block: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type != tokenize.COMMENT:
            continue
        if block and token.start[0] != last + 1:
            yield last, " ".join(block)
            block = []
        block.append(token.string.lstrip("#").strip())
        last = token.start[0]
    if block:
        yield last, " ".join(block)


def names(module: Module) -> Iterator[tuple[int, str]]:
    """Yields each name that the module defines or binds, its words apart, with its line."""
    for node in ast.walk(module.tree):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                found = node.name
            case ast.arg():
                found = node.arg
            case ast.Name(ctx=ast.Store()):
                found = node.id
            case ast.Attribute(ctx=ast.Store()):
                found = node.attr
            case _:
                continue
        yield node.lineno, re.sub(r"(?<=[a-z])(?=[A-Z])", " ", found).replace("_", " ")


def fragments(module: Module) -> Iterator[str]:
    """Yields the docstrings that begin with a fragment, with their places."""
    for line, text in docstrings(module):
        if FRAGMENT.match(text):
            yield f"{_place(module, line)}: {text.splitlines()[0]}"


def refused_words(module: Module) -> Iterator[str]:
    """Yields the words of `REFUSED` in docstrings, comments and names, with their places."""
    terms = _TERMS.get(module.name.partition(".")[0])
    for find in (docstrings, comments, names):
        for line, text in find(module):
            plain = _NAMED.sub("", " ".join(text.split()))
            for match in _WORDS.finditer(plain if terms is None else terms.sub("", plain)):
                yield f"{_place(module, line)}: {match[0]}"


def _place(module: Module, line: int) -> str:
    return f"{module.path.relative_to(CHECKOUT)}:{line}"


def main(packages: Sequence[str]) -> int:
    """Prints what is found in these packages of the product, or in all of it. Returns 1 if that is anything."""
    found = [
        place
        for module in product_modules()
        if not packages or any(f"{module.name}.".startswith(f"{package}.") for package in packages)
        for place in (*fragments(module), *refused_words(module))
    ]
    print(*found, sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
