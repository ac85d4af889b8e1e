"""The monitoring page ``/goblin``: a Bokeh page in the style of Dask's dashboard.

The charts are built here once and sent as JSON; the page's script polls ``status.json`` every two seconds and fills
them and its tables. So nothing is held on the server for a viewer, plain HTTP suffices behind any proxy, and every
script comes from this machine: Bokeh's own, as installed, and ours. No script is inline, so that the page's content
security policy can forbid all others.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any, Final

import jinja2
from aiohttp import web

from goblin_dask.gateway.status import PERIOD, STATES

_HERE = Path(__file__).parent
_ASSETS: Final = {
    "goblin.js": "text/javascript",
    "goblin.css": "text/css",
    "bokeh.min.js": "text/javascript",
}
POLICY: Final = (
    "default-src 'none'; script-src 'self'; connect-src 'self'; img-src 'self' data:; font-src 'self'; "
    "style-src 'self' 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)

INK, MUTED, GRID = "#22272e", "#5b6573", "#e6e9ee"
ORANGE, BLUE, GREEN, RED, PURPLE, GREY, YELLOW = (
    "#e8730c",
    "#2f6fb7",
    "#3a8f4f",
    "#c8372d",
    "#7d5ab5",
    "#98a2b0",
    "#d9a400",
)
STATE_COLOURS: Final = dict(zip(STATES, (GREY, YELLOW, ORANGE, BLUE, PURPLE, GREEN, RED), strict=True))
METHODS: Final = ("algebraic", "relation", "recompute", "replicate", "structural")
"""Shown from the start; others appear when they were used."""


def routes() -> list[web.RouteDef]:
    """The page, its charts and its scripts."""
    return [
        web.get("/", _redirect),
        web.get("/goblin", _page),
        web.get("/goblin/charts.json", _charts),
        web.get("/goblin/static/{name}", _asset),
    ]


async def _redirect(request: web.Request) -> web.StreamResponse:
    raise web.HTTPFound("goblin")  # relative: a proxy may have put us below a path of its own


async def _page(request: web.Request) -> web.StreamResponse:
    return web.Response(
        text=_html(),
        content_type="text/html",
        headers={
            "Content-Security-Policy": POLICY,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        },
    )


async def _charts(request: web.Request) -> web.StreamResponse:
    # Bokeh takes half a second to import: not while sessions wait for the loop.
    return _compressed(request, await asyncio.to_thread(charts), "application/json", "no-cache")


async def _asset(request: web.Request) -> web.StreamResponse:
    name = request.match_info["name"]
    if name not in _ASSETS:
        raise web.HTTPNotFound(text="the gateway serves no such file")
    return _compressed(request, await asyncio.to_thread(_read, name), _ASSETS[name], "max-age=3600")


def _compressed(request: web.Request, body: tuple[bytes, bytes], kind: str, caching: str) -> web.Response:
    plain, packed = body
    headers = {"Cache-Control": caching, "Vary": "Accept-Encoding", "X-Content-Type-Options": "nosniff"}
    if "gzip" in request.headers.get("Accept-Encoding", ""):
        return web.Response(
            body=packed, content_type=kind, charset="utf-8", headers=headers | {"Content-Encoding": "gzip"}
        )
    return web.Response(body=plain, content_type=kind, charset="utf-8", headers=headers)


@cache
def _html() -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE / "templates"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template("page.html").render(period=int(PERIOD * 1000))


@cache
def _read(name: str) -> tuple[bytes, bytes]:
    if name == "bokeh.min.js":
        from bokeh.settings import settings

        path = Path(settings.bokehjs_path()) / "js" / name
    else:
        path = _HERE / "static" / name
    data = path.read_bytes()
    return data, gzip.compress(data, 6)


@cache
def charts() -> tuple[bytes, bytes]:
    """All charts for BokehJS, as JSON, plain and compressed."""
    from bokeh.embed import json_item

    items = [
        json_item(build(), target)
        for target, build in (
            ("chart-flops", _throughput),
            ("chart-bytes", _transfer),
            ("chart-tasks", _tasks),
            ("chart-methods", _methods),
        )
    ]
    data = json.dumps(items).encode()
    return data, gzip.compress(data, 6)


# --- charts -----------------------------------------------------------------------------------------------------
def _figure(**options: Any) -> Any:
    from bokeh.plotting import figure

    plot = figure(
        height=230, sizing_mode="stretch_width", toolbar_location=None, tools="", min_border_right=18, **options
    )
    plot.outline_line_color = None
    plot.background_fill_color = plot.border_fill_color = "#ffffff"
    for axis in plot.axis:
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_text_color = MUTED
        axis.axis_label_text_font_size = axis.major_label_text_font_size = "12px"
        axis.major_label_text_color = INK
        axis.axis_line_color = GREY
        axis.major_tick_line_color = axis.minor_tick_line_color = None
    plot.grid.grid_line_color = GRID
    return plot


def _time_series(name: str, label: str) -> Any:
    from bokeh.models import DatetimeTickFormatter, NumeralTickFormatter, Range1d

    plot = _figure(
        x_axis_type="datetime",
        x_axis_label="local time",
        y_axis_label=label,
        # Ranges are the script's: automatic ones cannot be told to end at this moment.
        x_range=Range1d(0, 60_000, name=f"{name}-x"),
        y_range=Range1d(0, 1, name=f"{name}-y"),
    )
    plot.xgrid.grid_line_color = None
    plot.xaxis.formatter = DatetimeTickFormatter(
        **dict.fromkeys(("seconds", "minsec", "minutes"), "%H:%M:%S"), hourmin="%H:%M", hours="%H:%M"
    )
    plot.yaxis.formatter = NumeralTickFormatter(format="0,0.[00]")
    plot.xaxis.ticker.desired_num_ticks = 6
    plot.yaxis.ticker.desired_num_ticks = 5
    return plot


def _throughput() -> Any:
    from bokeh.models import ColumnDataSource, HoverTool

    source = ColumnDataSource({"time": [], "gflops": []}, name="flops")
    plot = _time_series("flops", "verified, GFLOP/s")
    plot.varea("time", 0, "gflops", source=source, fill_color=ORANGE, fill_alpha=0.18)
    line = plot.line("time", "gflops", source=source, line_color=ORANGE, line_width=2)
    plot.add_tools(
        HoverTool(
            renderers=[line],
            mode="vline",
            tooltips=[("", "@time{%H:%M:%S}"), ("verified", "@gflops{0,0.00} GFLOP/s")],
            formatters={"@time": "datetime"},
        )
    )
    return plot


def _transfer() -> Any:
    from bokeh.models import ColumnDataSource, HoverTool

    source = ColumnDataSource({"time": [], "down": [], "up": []}, name="bytes")
    plot = _time_series("bytes", "blobs, MB/s")
    down = plot.line("time", "down", source=source, color=BLUE, line_width=2, legend_label="to volunteers")
    plot.line("time", "up", source=source, color=GREEN, line_width=2, legend_label="from volunteers")
    plot.legend.location = "top_left"
    plot.legend.orientation = "horizontal"
    plot.legend.border_line_color = None
    plot.legend.background_fill_alpha = 0.7
    plot.legend.label_text_font_size = "12px"
    plot.legend.label_text_color = INK
    plot.legend.padding = plot.legend.margin = 4
    plot.legend.spacing = 18
    plot.add_tools(
        HoverTool(
            renderers=[down],
            mode="vline",
            tooltips=[("", "@time{%H:%M:%S}"), ("to volunteers", "@down{0,0.00} MB/s"), ("from", "@up{0,0.00} MB/s")],
            formatters={"@time": "datetime"},
        )
    )
    return plot


def _bars(name: str, factors: tuple[str, ...], columns: dict[str, list[Any]], label: str) -> Any:
    from bokeh.models import ColumnDataSource, FactorRange, NumeralTickFormatter, Range1d

    source = ColumnDataSource({"name": list(factors), "text": [""] * len(factors), **columns}, name=name)
    plot = _figure(
        y_range=FactorRange(factors=list(reversed(factors)), name=f"{name}-names"),
        x_range=Range1d(0, 10, name=f"{name}-range"),
        x_axis_label=label,
    )
    plot.hbar(y="name", right="count", left=0, height=0.62, source=source, fill_color="colour", line_color=None)
    plot.text(
        x="count",
        y="name",
        text="text",
        x_offset=6,
        source=source,
        text_baseline="middle",
        text_font_size="12px",
        text_color=INK,
    )
    plot.ygrid.grid_line_color = None
    plot.xaxis.formatter = NumeralTickFormatter(format="0,0")
    plot.xaxis.ticker.desired_num_ticks = 5
    plot.xaxis.ticker.min_interval = 1
    return plot


def _tasks() -> Any:
    columns: dict[str, list[Any]] = {"count": [0] * len(STATES), "colour": [STATE_COLOURS[state] for state in STATES]}
    return _bars("tasks", STATES, columns, "tasks")


def _methods() -> Any:
    columns: dict[str, list[Any]] = {"count": [0] * len(METHODS), "colour": [GREEN] * len(METHODS)}
    return _bars("methods", METHODS, columns, "results accepted")
