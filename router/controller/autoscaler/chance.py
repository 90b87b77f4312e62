"""What chance explains, and what it does not. Pure."""

from __future__ import annotations

# Standard deviations by which a short look must be off before it counts: not at all at the first, wholly at the second. A
# day has 8,640 ticks, so 3 happen by chance every hour or two, and 4 once in days.
CHANCE, CHANGE = 3.0, 4.0


def unless_changed(long: float, short: float, deviation: float) -> float:
    """The long look's value, unless the short one's is another. `deviation`: the short one's standard one, if nothing has
    changed; 0: nobody knows."""
    if not deviation:
        return short
    return long + belief(abs(short - long) / deviation) * (short - long)


def belief(doubts: float) -> float:
    """That something is another: 0 to 1, by how many standard deviations it is off."""
    return min(1.0, max(0.0, (doubts - CHANCE) / (CHANGE - CHANCE)))
