"""Attainment against rate, as an SVG. No library of plots is among what Baton needs; some lines and labels need none. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 56, 56
# Okabe and Ito's colours, which colour-blind readers tell apart: jfly.uni-koeln.de/color, 2008
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    points: Sequence[tuple[float, float]]  # (calls/s, share within targets)
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line."""

    name: str
    rate: float


def plot(title: str, lines: Sequence[Line], *, wanted: float, marks: Sequence[Mark] = ()) -> str:
    """`wanted`: the share that is to be held, drawn across. Raises: ValueError: there is no point."""
    rates = [rate for line in lines for rate, _ in line.points] + [mark.rate for mark in marks]
    if not rates:
        raise ValueError("there is no point to draw")
    top = _round_up(max(rates))

    def x(rate: float) -> float:
        return _LEFT + rate / top * (_WIDTH - _LEFT - _RIGHT)

    def y(share: float) -> float:
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    parts = [_text(_LEFT, 22, title, size=15)]
    for tick in range(6):
        share, rate = tick / 5, top * tick / 5
        parts.append(_rule(_LEFT, y(share), _WIDTH - _RIGHT, y(share), "#ddd"))
        parts.append(_text(_LEFT - 8, y(share) + 4, f"{100 * share:.0f} %", anchor="end"))
        parts.append(_text(x(rate), _HEIGHT - _BOTTOM + 18, f"{rate:g}", anchor="middle"))
    parts.append(_text(_WIDTH / 2, _HEIGHT - 12, "calls per second", anchor="middle"))
    parts.append(_rule(_LEFT, y(wanted), _WIDTH - _RIGHT, y(wanted), "#666", dash="2 3"))
    for mark in marks:
        parts.append(_rule(x(mark.rate), _TOP, x(mark.rate), _HEIGHT - _BOTTOM, "#666", dash="6 3"))
        parts.append(_text(x(mark.rate) + 4, _TOP + 12, mark.name))
    for number, line in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        dash = ' stroke-dasharray="6 4"' if line.dashed else ""
        points = " ".join(f"{x(rate):.1f},{y(share):.1f}" for rate, share in line.points)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        parts += [
            f'<circle cx="{x(rate):.1f}" cy="{y(share):.1f}" r="3" fill="{colour}"/>' for rate, share in line.points
        ]
        parts.append(_text(_LEFT + 12, _HEIGHT - _BOTTOM - 12 - 16 * (len(lines) - 1 - number), line.name, fill=colour))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>', *parts, "</svg>\n"])


def _round_up(value: float) -> float:
    """To 1, 2, 2.5 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= value)


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, fill: str = "#333") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{fill}">{escape(text)}</text>'
    )


def _rule(x1: float, y1: float, x2: float, y2: float, colour: str, dash: str = "") -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dashes}/>'
