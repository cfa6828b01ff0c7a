"""The table of faults names tests that exist."""

import ast
import re

from tests.reference_fixtures import CHECKOUT

TABLE = (CHECKOUT / "docs" / "reliability.md").read_text(encoding="utf-8")


def test_every_row_names_a_test_that_exists() -> None:
    rows = [line for line in TABLE.splitlines() if line.startswith("| ")][1:]
    named = [re.search(r"`(\S+\.py)::(\w+)` \|$", row) for row in rows]
    assert len(rows) > 15
    assert all(named)
    for match in filter(None, named):
        tree = ast.parse((CHECKOUT / match[1]).read_text(encoding="utf-8"))
        functions = {
            node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert match[2] in functions, match[0]
