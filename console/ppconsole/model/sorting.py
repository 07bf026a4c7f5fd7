"""Sorting the rows of a table by one of their fields, either way round."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from ppconsole.model.filters import Field

AnyRow = TypeVar("AnyRow")
ARRIVAL = "arrival"
"""The order in which the engine lists the rows."""


class Order(NamedTuple):
    """The field that sorts a table, by its name or `ARRIVAL`, and whether the largest value is first."""

    column: str = ARRIVAL
    descending: bool = False

    def reversed(self) -> Order:
        """Return the opposite order."""
        return self._replace(descending=not self.descending)

    def by(self, column: str, fields: Mapping[str, Field]) -> Order:
        """Return the order by `column`, figures with the largest first; by the present column, the opposite one."""
        if column == self.column:
            return self.reversed()
        return Order(column, column != ARRIVAL and fields[column].largest_first)


BY_ARRIVAL = Order()


def letters(columns: Sequence[str]) -> dict[str, str]:
    """Return a letter or digit for each column: the first one of its name that no earlier column has, or any other."""
    found: dict[str, str] = {}
    for column in columns:
        signs = (*column, *string.ascii_lowercase, *string.digits)
        found[column] = next(sign for sign in signs if sign not in found.values())
    return found


def arranged(rows: Sequence[AnyRow], order: Order, fields: Mapping[str, Field]) -> list[AnyRow]:
    """Return `rows` in an order. Rows whose field is unknown are the last ones, either way round."""
    if order.column == ARRIVAL:
        return list(rows[::-1] if order.descending else rows)
    rank = fields[order.column].rank
    known: list[tuple[Any, AnyRow]] = []
    unknown: list[AnyRow] = []
    for row in rows:
        value = rank(row)
        if value is None or value == "":
            unknown.append(row)
        else:
            known.append((value, row))
    known.sort(key=lambda pair: pair[0], reverse=order.descending)
    return [*(row for _, row in known), *unknown]
