"""Charts as inline SVG text: lines, bars, and strips over time. No script; colours come from the page's style sheet.

In: numbers. Out: SVG elements whose text is escaped. A value that is missing (`None`) leaves a gap. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 560, 230
WIDE = 2 * _WIDTH
"""Width of a chart that takes a whole row."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 12, 30
_MAX_POINTS = 240
_MAX_MARKS = 90

Format = Callable[[float], str]
Ticks = Callable[[float, float, int], list[float]]
XAxis = tuple[float, float, float]
"""Least value, greatest value, width of the chart."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line: ``points`` are (x, y) by growing x; ``colour`` is a style class `c1` to `c6`; ``marked`` draws a dot a point."""

    name: str
    colour: str
    points: Sequence[tuple[float, float | None]]
    marked: bool = False


@dataclass(frozen=True, slots=True)
class Strip:
    """One row of a strip chart: spans (start, end, share in [0, 1], style class)."""

    name: str
    spans: Sequence[tuple[float, float, float, str]]


def short(value: float) -> str:
    """A number for an axis: 1.2k, 0.35, 3."""
    if value != 0 and abs(value) < 0.001:
        return f"{value:.0e}"
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}"


def clock(seconds: float) -> str:
    """Minutes and seconds, or hours and minutes."""
    whole = round(seconds)
    return f"{whole // 3600} h {whole % 3600 // 60:02d}" if whole >= 7200 else f"{whole // 60}:{whole % 60:02d}"


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round values within [low, high], about ``count`` of them."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(step * size for step in (1, 2, 2.5, 5, 10) if step * size >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def whole_ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round integers within [low, high]."""
    return [tick for tick in ticks(low, high, count) if tick == round(tick)]


def clock_ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round times in seconds within [low, high]."""
    sizes = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)
    step = next((size for size in sizes if size * count >= high - low), sizes[-1])
    return [float(at) for at in range(math.ceil(low / step) * step, math.floor(high) + 1, step)]


def thinned(points: Sequence[tuple[float, float | None]], most: int = _MAX_POINTS) -> list[tuple[float, float | None]]:
    """At most ``most`` points: means over equal stretches, gaps left out of them."""
    if len(points) <= most:
        return list(points)
    size = len(points) / most
    thin: list[tuple[float, float | None]] = []
    for i in range(most):
        part = points[round(i * size) : round((i + 1) * size)]
        values = [y for _, y in part if y is not None]
        thin.append((sum(x for x, _ in part) / len(part), sum(values) / len(values) if values else None))
    return thin


def line_chart(
    series: Sequence[Series],
    *,
    width: float = _WIDTH,
    x_ticks: Ticks = whole_ticks,
    x_format: Format = short,
    y_format: Format = short,
    y_range: tuple[float | None, float | None] = (None, None),
) -> str:
    """Lines over a common x axis; ``y_range`` fixes an end of the y axis. Empty text where there is nothing to draw."""
    drawn = [Series(s.name, s.colour, thinned([p for p in s.points if _finite(p)]), s.marked) for s in series]
    drawn = [s for s in drawn if any(y is not None for _, y in s.points)]
    if not drawn:
        return ""
    xs = [x for s in drawn for x, _ in s.points]
    ys = [y for s in drawn for _, y in s.points if y is not None]
    x_axis, y_axis = (*_padded(min(xs), max(xs), 0.0), width), _y_axis(ys, y_range)
    body = _grid(y_axis, y_format, width)
    for tick in x_ticks(x_axis[0], x_axis[1], 6):
        x = _x(tick, x_axis)
        body.append(f'<text x="{x:.1f}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(x_format(tick))}</text>')
    for s in drawn:
        few = " few" if s.marked and len(s.points) < 3 else ""
        body.append(f'<path class="line {s.colour}{few}" d="{_path(s.points, x_axis, y_axis)}"/>')
        if s.marked or len(s.points) <= _MAX_MARKS:
            body += [_mark(s, x, y, x_axis, y_axis, x_format, y_format) for x, y in s.points if y is not None]
    return _svg(body, _HEIGHT, width) + _legend([(s.name, s.colour) for s in drawn])


def bar_chart(bars: Sequence[tuple[str, float]], colour: str = "c1", *, y_format: Format = short) -> str:
    """Upright bars with their values above them."""
    if not bars or not any(value for _, value in bars):
        return ""
    y_axis = _y_axis([value for _, value in bars], (0.0, None))
    width = (_WIDTH - _LEFT - _RIGHT) / len(bars)
    body = _grid(y_axis, y_format, _WIDTH)
    for i, (name, value) in enumerate(bars):
        inset = max(1.0, (width - 64) / 2, width * 0.08)
        x, y = _LEFT + i * width + inset, _y(value, y_axis)
        middle = _LEFT + (i + 0.5) * width
        label = f"{escape(name)}: {value:,.0f}"
        body.append(
            f'<rect class="bar {colour}" x="{x:.1f}" y="{y:.1f}" width="{width - 2 * inset:.1f}" height="{_base() - y:.1f}" rx="3">'
            f"<title>{label}</title></rect>"
        )
        body.append(f'<text class="value" x="{middle:.1f}" y="{y - 5:.1f}" text-anchor="middle">{y_format(value)}</text>')
        body.append(f'<text x="{middle:.1f}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(name)}</text>')
    return _svg(body, _HEIGHT)


def strip_chart(strips: Sequence[Strip], end: float, legend: Sequence[tuple[str, str]]) -> str:
    """Rows of coloured spans over the time [0, end] in seconds; a span's opacity is its share."""
    strips = [strip for strip in strips if strip.spans]
    if not strips or end <= 0:
        return ""
    row, gap, left = 26, 10, 92
    height = len(strips) * (row + gap) + 24
    scale = (WIDE - left - _RIGHT) / end
    body = []
    for i, strip in enumerate(strips):
        y = 4 + i * (row + gap)
        body.append(f'<text x="{left - 12}" y="{y + row / 2 + 4:.0f}" text-anchor="end">{escape(strip.name)}</text>')
        body.append(f'<rect class="track" x="{left}" y="{y}" width="{end * scale:.1f}" height="{row}" rx="3"/>')
        for start, stop, share, colour in strip.spans:
            width = max(0.4, (min(stop, end) - start) * scale)
            title = f"{escape(strip.name)}, {clock(start)}: {share:.0%}"
            body.append(
                f'<rect class="{colour}" x="{left + start * scale:.1f}" y="{y}" width="{width:.2f}" height="{row}" '
                f'opacity="{min(1.0, share):.2f}"><title>{title}</title></rect>'
            )
    for tick in clock_ticks(0, end, 10):
        body.append(f'<text x="{left + tick * scale:.1f}" y="{height - 4}" text-anchor="middle">{clock(tick)}</text>')
    return _svg(body, height, WIDE) + _legend(legend)


def _finite(point: tuple[float, float | None]) -> bool:
    return point[1] is None or math.isfinite(point[1])


def _padded(low: float, high: float, share: float) -> tuple[float, float]:
    pad = (high - low) * share or (abs(high) * 0.1 or 1.0 if high == low else 0.0)
    return low - pad, high + pad


def _y_axis(ys: Sequence[float], fixed: tuple[float | None, float | None]) -> tuple[float, float]:
    low, high = _padded(min(ys), max(ys), 0.08)
    return (low if fixed[0] is None else fixed[0], high if fixed[1] is None else fixed[1])


def _x(value: float, axis: XAxis) -> float:
    low, high, width = axis
    return _LEFT + (value - low) / (high - low) * (width - _LEFT - _RIGHT)


def _y(value: float, axis: tuple[float, float]) -> float:
    share = (min(max(value, axis[0]), axis[1]) - axis[0]) / (axis[1] - axis[0])
    return _base() - share * (_base() - _TOP)


def _base() -> float:
    return _HEIGHT - _BOTTOM


def _grid(y_axis: tuple[float, float], y_format: Format, width: float) -> list[str]:
    body = []
    values = ticks(*y_axis)
    if len({y_format(value) for value in values}) < len(values):
        y_format = _decimals(values[1] - values[0])
    for tick in values:
        y = _y(tick, y_axis)
        body.append(f'<line class="grid" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        body.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(y_format(tick))}</text>')
    return body


def _decimals(step: float) -> Format:
    """Enough digits that values ``step`` apart differ."""
    digits = max(0, 1 - math.floor(math.log10(step)))
    return lambda value: f"{value:.{digits}f}"


def _path(points: Sequence[tuple[float, float | None]], x_axis: XAxis, y_axis: tuple[float, float]) -> str:
    parts, pen_up = [], True
    for x, y in points:
        if y is None:
            pen_up = True
            continue
        parts.append(f"{'M' if pen_up else 'L'}{_x(x, x_axis):.1f} {_y(y, y_axis):.1f}")
        pen_up = False
    return "".join(parts)


def _mark(s: Series, x: float, y: float, x_axis: XAxis, y_axis: tuple[float, float], x_format: Format, y_format: Format) -> str:
    shown = "dot" if s.marked else "dot hidden"
    title = f"<title>{escape(s.name)} at {escape(x_format(x))}: {escape(y_format(y))}</title>"
    return f'<circle class="{shown} {s.colour}" cx="{_x(x, x_axis):.1f}" cy="{_y(y, y_axis):.1f}" r="4">{title}</circle>'


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    if len(entries) < 2:
        return ""
    keys = "".join(f'<span class="key"><i class="{colour}"></i>{escape(name)}</span>' for name, colour in entries)
    return f'<div class="legend">{keys}</div>'


def _svg(body: Sequence[str], height: float, width: float = _WIDTH) -> str:
    return f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img">{"".join(body)}</svg>'
