"""Self-contained HTML reports.

The Kubeflow UI shows an artifact in a sandboxed frame without its origin, so a report holds its
style and its plots (inline SVG) itself and loads nothing.
"""

import html
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment

from bebop.provenance import atomic_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAGE = Environment(autoescape=True).from_string(
    """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>
body{font:15px/1.5 system-ui,sans-serif;color:#1c2330;max-width:60rem;margin:2rem auto;
 padding:0 1rem}
h1{font-size:1.5rem;margin-bottom:.2rem} h2{font-size:1.15rem;margin-top:2rem}
.verdict{background:#eef4ff;border-left:4px solid #2f6fde;padding:.8rem 1rem;margin:1rem 0}
table{display:block;overflow-x:auto;border-collapse:collapse;margin:.8rem 0;
 font-variant-numeric:tabular-nums}
th,td{border-bottom:1px solid #dde2ea;padding:.25rem .8rem;text-align:right}
th:first-child,td:first-child{text-align:left} th{background:#f6f7f9}
caption,figcaption{caption-side:bottom;color:#5a6475;font-size:.85rem;text-align:left}
figure{margin:1rem 0} svg{max-width:100%;height:auto}
pre{background:#f6f7f9;padding:.6rem;white-space:pre-wrap}
</style></head><body><h1>{{ title }}</h1>
{% for part in parts %}{{ part }}
{% endfor %}</body></html>
"""
)


def format_value(value: Any) -> str:
    """A table cell: three significant decimals for floats, a dash for what is not a number."""
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else "–"
    return str(value)


def new_figure(width: float = 7.0, height: float = 3.6) -> "tuple[Figure, Axes]":
    """A matplotlib figure (inches) with one axis and without pyplot's global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axis = figure.subplots()
    axis.grid(alpha=0.25)
    return figure, axis


class Report:
    """Collects parts in reading order, then writes one HTML file.

    >>> report = Report("diagnosis")
    >>> report.verdict("Use rejection sampling with gamma 3.")
    >>> report.write(Path("report.html"))
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self._parts: list[str] = []

    def verdict(self, text: str) -> None:
        """The highlighted paragraph on top of what follows."""
        self._parts.append(f'<p class="verdict">{html.escape(text)}</p>')

    def heading(self, text: str) -> None:
        """A section heading."""
        self._parts.append(f"<h2>{html.escape(text)}</h2>")

    def paragraph(self, text: str) -> None:
        """Plain text."""
        self._parts.append(f"<p>{html.escape(text)}</p>")

    def preformatted(self, text: str) -> None:
        """Text whose line breaks matter: a sample, a log excerpt."""
        self._parts.append(f"<pre>{html.escape(text)}</pre>")

    def table(
        self, headers: Sequence[str], rows: Sequence[Sequence[Any]], caption: str = ""
    ) -> None:
        """A table; floats are shown with four significant digits."""
        head = "".join(f"<th>{html.escape(h)}</th>" for h in headers)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(format_value(v))}</td>" for v in row) + "</tr>"
            for row in rows
        )
        foot = f"<caption>{html.escape(caption)}</caption>" if caption else ""
        self._parts.append(f"<table>{foot}<tr>{head}</tr>{body}</table>")

    def figure(self, figure: "Figure", caption: str = "") -> None:
        """A matplotlib figure as inline SVG."""
        buffer = io.StringIO()
        figure.savefig(
            buffer,
            format="svg",
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
        svg = buffer.getvalue()
        svg = svg[svg.index("<svg") :]
        note = f"<figcaption>{html.escape(caption)}</figcaption>" if caption else ""
        self._parts.append(f"<figure>{svg}{note}</figure>")

    def write(self, path: Path) -> None:
        """Write the page atomically."""
        from markupsafe import Markup

        page = PAGE.render(title=self.title, parts=[Markup(part) for part in self._parts])
        with atomic_file(path) as temporary:
            temporary.write_text(page, encoding="utf-8")
