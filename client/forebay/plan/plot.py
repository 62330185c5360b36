"""A chart as SVG text, or as PNG where matplotlib is there.

Owns the drawing of lines over one axis. Does not own what they mean.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 190, 40, 50
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")


class CannotPlot(ValueError):
    """The file's kind is not known, or what it needs is not installed."""


@dataclass(frozen=True, slots=True)
class Line:
    """One curve."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves over a common axis; `marks` are named places on it. `log_x`: the axis is logarithmic, and all of it above 0."""

    title: str
    x_name: str
    y_name: str
    lines: tuple[Line, ...]
    marks: tuple[tuple[str, float], ...] = ()
    log_x: bool = False
    y_max: float | None = None


def ready(path: Path) -> None:
    """Raise CannotPlot where write() would not know how, before anything is computed."""
    kind = path.suffix.lower()
    if kind not in (".svg", ".png"):
        raise CannotPlot(f"{path} ends in neither .svg nor .png")
    if kind == ".png":
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise CannotPlot("a PNG needs matplotlib: pip install matplotlib, or name a file that ends in .svg") from None


def write(charts: Sequence[Chart], path: Path) -> None:
    """All charts into one file, one above the other. Raises CannotPlot, OSError."""
    ready(path)
    if path.suffix.lower() == ".svg":
        path.write_text(svg(charts), encoding="utf-8")
    else:
        _png(charts, path)


def svg(charts: Sequence[Chart]) -> str:
    """The drawing."""
    height = HEIGHT * len(charts)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for number, chart in enumerate(charts):
        parts += [f'<g transform="translate(0 {number * HEIGHT})">', *_drawn(chart), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _drawn(chart: Chart) -> list[str]:
    xs = [x for line in chart.lines for x, _ in line.points] + [x for _, x in chart.marks]
    ys = [y for line in chart.lines for _, y in line.points]
    x_ticks, x_at = _scale(min(xs), max(xs), LEFT, WIDTH - RIGHT, chart.log_x)
    y_ticks, y_at = _scale(0.0, chart.y_max or max(ys) or 1.0, HEIGHT - BOTTOM, TOP, False)
    bottom, right, top_value = HEIGHT - BOTTOM, WIDTH - RIGHT, chart.y_max or math.inf
    parts = [_text(LEFT, TOP - 18, chart.title, "start", size=14)]
    for x in x_ticks:
        parts += [_rule(x_at(x), TOP, x_at(x), bottom, "#dddddd"), _text(x_at(x), bottom + 16, _short(x), "middle")]
    for y in y_ticks:
        parts += [_rule(LEFT, y_at(y), right, y_at(y), "#dddddd"), _text(LEFT - 6, y_at(y) + 4, _short(y), "end")]
    parts += [
        _text((LEFT + right) / 2, HEIGHT - 12, chart.x_name, "middle"),
        f'<g transform="translate(16 {(TOP + bottom) / 2:.1f}) rotate(-90)">{_text(0, 0, chart.y_name, "middle")}</g>',
    ]
    for number, (name, x) in enumerate(chart.marks):
        parts += [
            _rule(x_at(x), TOP, x_at(x), bottom, "#333333", dashed=True),
            _text(x_at(x) + 4, TOP + 14 + 14 * number, name, "start"),
        ]
    for number, line in enumerate(chart.lines):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(f"{x_at(x):.1f},{y_at(min(y, top_value)):.1f}" for x, y in line.points)
        y = TOP + 14 * number
        parts += [
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>',
            _rule(right + 10, y, right + 30, y, colour, width=2),
            _text(right + 36, y + 4, line.name, "start"),
        ]
    return parts


def _text(x: float, y: float, text: str, anchor: str, size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'


def _rule(x1: float, y1: float, x2: float, y2: float, colour: str, *, dashed: bool = False, width: int = 1) -> str:
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width}"{dash}/>'


def _scale(low: float, high: float, start: float, end: float, log: bool) -> tuple[list[float], Callable[[float], float]]:
    """Where to put ticks, and from a value to a place on the paper."""
    if log:
        low_log, high_log = math.log10(low), math.log10(high)
        span = (high_log - low_log) or 1.0
        powers = range(math.floor(low_log), math.ceil(high_log) + 1)
        ticks = [step * 10.0**power for power in powers for step in (1, 2, 5) if low <= step * 10.0**power <= high]
        return ticks, lambda value: start + (math.log10(max(value, low)) - low_log) / span * (end - start)
    span = (high - low) or 1.0
    step = 10.0 ** math.floor(math.log10(span))
    step = next(step * factor for factor in (0.1, 0.2, 0.5, 1.0, 2.0) if span / (step * factor) <= 8)
    ticks = [step * number for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return ticks, lambda value: start + (value - low) / span * (end - start)


def _short(value: float) -> str:
    for power, letter in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if abs(value) >= 10.0**power:
            return f"{value / 10.0**power:g}{letter}"
    return f"{value:.4g}"


def _png(charts: Sequence[Chart], path: Path) -> None:
    from matplotlib.figure import Figure  # without pyplot: no window system is asked for

    figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100 * len(charts)), dpi=100, layout="constrained")
    for axes, chart in zip(figure.subplots(len(charts), squeeze=False)[:, 0], charts, strict=True):
        for line in chart.lines:
            axes.plot(*zip(*line.points, strict=True), label=line.name)
        for name, x in chart.marks:
            axes.axvline(x, linestyle="--", color="#333333")
            axes.annotate(name, (x, 1), xycoords=("data", "axes fraction"), va="top")
        axes.set(title=chart.title, xlabel=chart.x_name, ylabel=chart.y_name, xscale="log" if chart.log_x else "linear")
        axes.set_ylim(0, chart.y_max)
        axes.legend(fontsize="small")
    figure.savefig(path)
