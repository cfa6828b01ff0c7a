"""Decides which sequences are preempted or yield if rows or pages do not suffice, by each tenant's share of both.

A tenant's share is the larger of its part of the rows of a batch and its part of the pages (dominant resource
fairness). Pages that a sequence found in the prefix cache are not counted: several sequences may hold them.

Rules
  Y1  A sequence yields to one of another tenant only if that one can start then, and if afterwards
        a) its own tenant still has at least the share that the other one then has; or
        b) the other tenant had no row, and its own has one left; or
        c) the other tenant had no row, and its own tenant, whose only row this is, has been served more than the
           other, by at least as many tokens as the other sequence has positions to compute: the two take turns.
      So no tenant is left with less than the one that it yields to, and no two take from each other in turns that
      are shorter than their cost.
  Y2  The tenant with the largest share yields first, and of its sequences the youngest that may. That is one whose
      prompt is not being computed yet, or one that has got a token since it started; if it had yielded or been
      preempted before, `MIN_TOKENS`.
  Y3  If a running sequence needs a page and none is available, the youngest sequence of the tenant with the
      largest share is preempted, of the tenants with several rows if there are any. So the oldest sequence of a
      tenant is preempted only if each tenant has one row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

MIN_TOKENS = 16
"""The tokens that a sequence gets after each return before it may yield again: those of one page, since it may have
to compute a page again."""


class Row(Protocol):
    """Describes the facts that the shares need about a sequence that holds a row of the batch."""

    start_number: int | None
    """The number of the first start, which rises from row to row."""

    @property
    def tenant(self) -> str:
        """The tenant of the sequence."""
        ...

    def num_own_pages(self, page_size: int) -> int:
        """Returns the number of pages that it holds and did not find in the prefix cache when it last started."""
        ...

    @property
    def length(self) -> int:
        """The number of positions of the sequence, those of tokens in flight included."""
        ...

    @property
    def may_yield(self) -> bool:
        """True if Y2 lets the sequence yield."""
        ...


Holder = TypeVar("Holder", bound=Row)


@dataclass(slots=True)
class _Holding(Generic[Holder]):
    rows: list[Holder] = field(default_factory=list)
    """The rows of the tenant, the youngest last."""
    num_pages: int = 0


class TenantShares(Generic[Holder]):
    """Computes the shares of tenants from the sequences that are active when the object is made."""

    def __init__(self, active: Iterable[Holder], *, max_rows: int, num_pages: int, page_size: int) -> None:
        """Counts the shares of active sequences. `active`: oldest first."""
        self._max_rows = max_rows
        self._num_pages = num_pages
        self._page_size = page_size
        self._holdings: dict[str, _Holding[Holder]] = {}
        for sequence in active:
            holding = self._holdings.get(sequence.tenant)
            if holding is None:
                holding = self._holdings[sequence.tenant] = _Holding()
            holding.rows.append(sequence)
            holding.num_pages += sequence.num_own_pages(page_size)

    def share_of(self, tenant: str) -> float:
        """Returns the share of a tenant, from 0 to 1."""
        holding = self._holdings.get(tenant)
        return 0.0 if holding is None else self._share(len(holding.rows), holding.num_pages)

    def yielding_to(
        self,
        sequence: Holder,
        num_pages: int,
        suffice: Callable[[list[Holder]], bool],
        service_of: Callable[[str], float],
    ) -> list[Holder] | None:
        """Returns the sequences that yield so that a waiting sequence of `num_pages` pages can start; None if none
        may yield.

        `suffice` returns True if it can start without the given sequences, `service_of` returns the service of a
        tenant.
        """
        own = self._holdings.get(sequence.tenant) or _Holding[Holder]()
        share_then = self._share(len(own.rows) + 1, own.num_pages + num_pages)
        left = {
            tenant: _Holding(list(holding.rows), holding.num_pages)
            for tenant, holding in self._holdings.items()
            if tenant != sequence.tenant
        }
        found: list[Holder] = []
        while not suffice(found):
            for tenant, holding in sorted(left.items(), key=lambda item: -self._share_of(item[1])):
                row = next((row for row in reversed(holding.rows) if row.may_yield), None)
                if row is None:
                    continue
                num_rows, num_kept = len(holding.rows) - 1, holding.num_pages - row.num_own_pages(self._page_size)
                if self._share(num_rows, num_kept) >= share_then or (
                    not own.rows
                    and (num_rows or service_of(tenant) >= service_of(sequence.tenant) + sequence.length)
                ):
                    found.append(row)
                    holding.rows.remove(row)
                    holding.num_pages = num_kept
                    break
            else:
                return None
        return found

    def first_to_preempt(self) -> Holder:
        """Returns the sequence whose pages a running sequence gets (Y3)."""
        several = [holding for holding in self._holdings.values() if len(holding.rows) > 1]
        holdings = several or list(self._holdings.values())
        # Where shares are equal, the younger sequence.
        return max(holdings, key=lambda item: (self._share_of(item), item.rows[-1].start_number or 0)).rows[-1]

    def _share_of(self, holding: _Holding[Holder]) -> float:
        return self._share(len(holding.rows), holding.num_pages)

    def _share(self, num_rows: int, num_pages: int) -> float:
        return max(num_rows / self._max_rows, num_pages / self._num_pages)
