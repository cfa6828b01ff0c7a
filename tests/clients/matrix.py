"""Writes what the clients of others have shown as the table of docs/clients.md."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tests.clients.catalogue import CHECKOUT, CLIENTS, Client

PAGE = CHECKOUT / "docs" / "clients.md"
MATRIX = re.compile(r"(?<=<!-- matrix -->\n).*?(?=\n<!-- /matrix -->)", re.DOTALL)


@dataclass(frozen=True)
class Result:
    """How the run of a client ended; passed unless `failed` or `skipped` gives a reason."""

    client: Client
    versions: str = ""
    checks: tuple[str, ...] = ()
    duration_s: float = 0.0
    failed: str = ""
    skipped: str = ""

    def outcome(self) -> str:
        if self.failed:
            return f"failed: {self.failed}"
        return f"skipped: {self.skipped}" if self.skipped else "passed"

    def line(self) -> str:
        """Returns the result as one line."""
        line = f"{self.client.name}: {self.outcome()}, {len(self.checks)} checks in {self.duration_s:.0f} s"
        return f"{line} ({self.versions})" if self.versions else line


def rows_of_page() -> dict[str, str]:
    """Returns the rows of the page's table by the names of the clients."""
    found = MATRIX.search(PAGE.read_text(encoding="utf-8"))
    assert found is not None
    lines = [line for line in found[0].splitlines() if line.startswith("| ")]
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines[1:]}


def write_matrix(results: Sequence[Result], date: str, machine: str) -> None:
    """Writes the rows of these results into the table of the page, and keeps those of other clients."""
    rows = rows_of_page()
    for result in results:
        client, checked = result.client, "; ".join(result.checks)
        cells = (client.name, result.versions, client.interface, checked, result.outcome(), date)
        rows[client.name] = f"| {' | '.join(cells)} |"
    table = (
        f"Run by `make test-clients ALL=1` with {machine}:",
        "",
        "| Client | Versions | Interface | Checked | Result | Date |",
        "|---|---|---|---|---|---|",
        *(rows[client.name] for client in CLIENTS if client.in_matrix and client.name in rows),
    )
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(MATRIX.sub(lambda _: "\n".join(table), page, count=1), encoding="utf-8")
