"""A report is one page that loads nothing, whatever is put into it."""

import math
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from bebop.report import Report, format_value, new_figure


class Page(HTMLParser):
    """Collects what a browser would load, and whether tags are closed."""

    VOID = frozenset({"meta", "br", "hr", "img", "link", "input", "wbr"})

    def __init__(self) -> None:
        super().__init__()
        self.open, self.loads, self.scripts, self.text = [], [], 0, []
        self.tags = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        self.scripts += tag == "script"
        for name, value in attrs:
            local = name.split(":")[-1]
            if local in ("src", "href", "data", "srcset") and not (value or "").startswith("#"):
                self.loads.append((tag, name, value))
            if "url(" in (value or "") and "url(#" not in value:
                self.loads.append((tag, name, value))

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in ("p",):
            assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def parse(path) -> Page:
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    page.close()
    return page


@pytest.fixture
def page(tmp_path):
    report = Report("throughput α <b>")
    report.verdict("Use rejection & γ = 3.")
    report.heading("Numbers")
    report.paragraph("plain <script>alert(1)</script> text")
    report.preformatted("line 1\nline <2>")
    report.table(["batch", "speed-up"], [["1 <i>", 1.23456], [8, math.nan]], caption="a & b")
    for _ in range(2):
        figure, axis = new_figure()
        axis.plot([1, 2, 3], [3, 1, 2], marker="o", label="E[L]")
        axis.legend()
        report.figure(figure, caption="A plot")
    report.write(tmp_path / "report.html")
    return parse(tmp_path / "report.html")


def test_page_is_balanced_and_has_its_parts(page):
    assert page.open == []
    assert page.tags.count("svg") == 2
    assert page.tags.count("table") == 1
    assert "throughput α <b>" in "".join(page.text)


def test_page_loads_nothing_and_runs_nothing(page):
    assert page.loads == []
    assert page.scripts == 0
    assert not {"link", "img", "iframe", "object", "embed"} & set(page.tags)


def test_user_text_is_escaped(page):
    text = "".join(page.text)
    for part in ("<script>alert(1)</script>", "line <2>", "1 <i>", "a & b"):
        assert part in text
    assert "i" not in page.tags


def test_style_sheets_load_nothing(tmp_path):
    Report("empty").write(tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert "@import" not in page
    assert "url(" not in page


@pytest.mark.parametrize(
    ("value", "shown"),
    [(1.23456, "1.235"), (math.nan, "–"), (math.inf, "–"), (12, "12"), ("a", "a"), (0.0, "0")],
)
def test_cells(value, shown):
    assert format_value(value) == shown


def test_figures_leave_no_global_state():
    code = (
        "import sys; from bebop.report import new_figure; new_figure(); "
        "sys.exit('matplotlib.pyplot' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
