"""Units of a product, divided evenly over programs, and the places of their partial sums.

A unit is a tile of outputs times a piece of inputs. Units are numbered tile after tile. A program has
a span of consecutive ones, which may begin and end amid a tile. Every program has at least one unit.
The kernel compiles these functions.
"""

from __future__ import annotations


def first_unit(program: int, units: int, programs: int) -> int:
    """Return the first unit of `program`, which is behind the last of the one before."""
    return program * units // programs


def program_of(unit: int, units: int, programs: int) -> int:
    """Return the program whose span has `unit`."""
    return ((unit + 1) * programs - 1) // units


def place_of(program: int, number: int) -> int:
    """Return the place of partial sums, of two for each program, by contributor `number` of a tile.

    The first contributor ends its span amid the tile. All others begin theirs there.
    """
    return 2 * program + (number == 0)
