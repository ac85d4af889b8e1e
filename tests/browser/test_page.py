"""The monitoring page in a real Chromium: what is visible, and a screenshot to look at."""

from __future__ import annotations

import asyncio
import random
import re
import shutil
from pathlib import Path

import msgspec
import pytest
from playwright.async_api import async_playwright, expect

from goblin_dask import messages as m
from goblin_dask.digest import digest
from goblin_dask.gateway.page import METHODS
from tests.gridpeers import Bench, FakeLab, FakeValidator, FakeVolunteer, submission

SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (install the package chromium)")


class Browser:
    """A page of the gateway, and whatever it complained about."""

    def __init__(self, bench):
        self.bench = bench
        self.complaints: list[str] = []
        self.requests: list[str] = []

    async def __aenter__(self):
        self._playwright = await async_playwright().start()
        self.browser = await self._playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        self.page = await self.browser.new_page(viewport={"width": 1280, "height": 900})
        self.page.on("console", lambda message: message.type in ("error", "warning") and self.complain(message.text))
        self.page.on("pageerror", lambda error: self.complain(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        await self.page.goto(self.bench.gateway.url)
        await self.page.locator("body[data-fresh]").wait_for()
        return self

    async def __aexit__(self, *exc):
        await self.browser.close()
        await self._playwright.stop()

    def complain(self, text):
        self.complaints.append(text)

    async def refreshed(self):
        """Wait for the next answer of the gateway."""
        before = await self.page.locator("body").get_attribute("data-fresh")
        await expect(self.page.locator("body")).not_to_have_attribute("data-fresh", before)

    async def shot(self, name):
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        await self.page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)

    async def source(self, name):
        """Data of one of Bokeh's sources."""
        return await self.page.evaluate(
            """name => {
                 const source = Bokeh.documents.map((d) => d.get_model_by_name(name)).find((s) => s);
                 return Object.fromEntries(Object.entries(source.data).map(([k, v]) => [k, Array.from(v)]));
               }""",
            name,
        )

    async def drawn(self, chart, colour):
        """How many pixels of a chart's canvas have a colour (#rrggbb)."""
        return await self.page.evaluate(
            """([chart, colour]) => {
                 const canvases = [];
                 const walk = (node) => {
                   if (node.tagName === "CANVAS") canvases.push(node);
                   for (const child of [...(node.shadowRoot?.children ?? []), ...node.children]) walk(child);
                 };
                 walk(document.getElementById(chart));
                 const want = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
                 let n = 0;
                 for (const canvas of canvases) {
                   if (!canvas.width || !canvas.height) continue;
                   const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
                   for (let i = 0; i < data.length; i += 4) {
                     if (want.every((value, j) => Math.abs(data[i + j] - value) < 8) && data[i + 3] > 200) n += 1;
                   }
                 }
                 return n;
               }""",
            [chart, colour],
        )


async def test_an_empty_grid_says_what_to_do():
    async with Bench() as bench, Browser(bench) as browser:
        page = browser.page
        await expect(page.locator("#no-workers")).to_contain_text(
            f"dask worker goblin://127.0.0.1:{bench.gateway.port}"
        )
        await expect(page.locator("#no-jobs")).to_contain_text("No job has been submitted yet")
        await expect(page.locator("#workers")).to_be_hidden()
        await expect(page.locator("#f-volunteers")).to_have_text("0")
        assert (await browser.source("methods"))["text"] == ["not used"] * len(METHODS)
        await browser.shot("page-empty")
        assert not browser.complaints


CHUNK = m.ArraySpec((1 << 18,), "float32")
NOTHING = b"\x00" * 16
FLOPS = 2e9


async def compute(volunteer, work):
    """As long as it would take; results of large inputs are uploaded, a cache keeps what was fetched."""
    seconds = FLOPS / volunteer.machine.flops
    await asyncio.sleep(seconds)
    large = [ref for ref in work.inputs if ref.inline is None]
    if not large or volunteer.result == NOTHING:
        volunteer.commit(work)
        return
    result = m.BlobRef(digest(work.attempt.encode()), CHUNK, 1 << 20)
    moved = sum(ref.nbytes for ref in large)
    held = tuple(ref.digest for ref in large)
    volunteer.session.send(m.Committed(work.attempt, (result,), seconds, seconds, moved, held))
    volunteer.session.send(m.Uploaded(work.attempt, 0.01, result.nbytes))


async def check(validator, work):
    wrong = work.outputs[0].inline == NOTHING
    method, seconds = ("recompute", 0.012) if int(work.attempt[:2], 16) < 40 else ("algebraic", 0.0014)
    report = m.CheckReport("wrong" if wrong else "accepted", method, 40.0 if wrong else 0.31, seconds=seconds)
    validator.session.send(m.Checked(work.attempt, report))


async def activity(bench):
    """A grid in the middle of its day: fast and slow volunteers, a liar, two jobs, one of them done."""
    rng = random.Random(7)
    lab = await bench.add(FakeLab)
    other = await bench.add(FakeLab, owner="Bohr")
    await bench.add(FakeValidator, threads=2, slots=4, cache=0)
    for i, flops in enumerate((9.6e10, 4.1e10, 7.7e10, 1.9e10, 5.2e10, 8.3e9)):
        await bench.add(
            FakeVolunteer,
            token=await bench.token("volunteer", f"owner {i}"),
            flops=flops,
            threads=rng.choice((2, 4, 8, 16)),
            cache=rng.randrange(1, 6) << 29,
            device="cpu" if i else "NVIDIA GeForce RTX 4070",
            gpu_memory=0 if i else 12 << 30,
        )
    liar = await bench.add(FakeVolunteer, token=await bench.token("volunteer", "Eve"), flops=6.0e10)
    liar.result = NOTHING
    other.submit(*(submission(10_000 + i, job="7e" * 16, flops=FLOPS) for i in range(140)))
    await other.accepted(140)
    tasks = [submission(i, large=(1 + i % 4) << 20, job="c4" * 16, flops=FLOPS) for i in range(900)]
    lab.submit(*(msgspec.structs.replace(task, outputs=(CHUNK,)) for task in tasks))
    return lab


async def test_a_busy_grid(monkeypatch):
    monkeypatch.setattr(FakeVolunteer, "perform", compute)
    monkeypatch.setattr(FakeValidator, "perform", check)
    monkeypatch.setattr("goblin_dask.gateway.server.PERIOD", 0.1)  # a second of activity instead of a minute
    monkeypatch.setattr("goblin_dask.gateway.server.FRESH", 0.0)
    async with Bench() as bench, Browser(bench) as browser:
        lab = await activity(bench)
        await lab.accepted(400, 30)
        page = browser.page
        await browser.refreshed()
        await expect(page.locator("#workers tbody tr")).to_have_count(7)  # the liar has gone

        await expect(page.locator("#connection")).to_contain_text("gateway up for")
        await expect(page.locator("#f-volunteers")).to_have_text("6")
        assert float((await page.locator("#f-flops").inner_text()).replace(",", "")) > 0
        assert re.fullmatch(r"[\d.]+ %", await page.locator("#f-share").inner_text())

        rows = await page.locator("#workers tbody tr").all_inner_texts()
        assert sum("validator" in row for row in rows) == 1
        assert any("NVIDIA GeForce RTX 4070" in row for row in rows)
        assert any(re.search(r"[MG]B / [\d.]+ [MG]B", row) for row in rows)
        jobs = await page.locator("#jobs tbody tr").all_inner_texts()
        assert len(jobs) == 2
        assert any("100 % of 140" in job for job in jobs)
        assert any(re.search(r"\b\d\d % of 900", job) for job in jobs)

        history = await browser.source("flops")
        assert len(history["time"]) == len(history["gflops"]) > 5
        assert max(history["gflops"]) > 0
        moved = await browser.source("bytes")
        assert max(moved["down"]) > 0
        assert max(moved["up"]) > 0
        tasks = await browser.source("tasks")
        counts = dict(zip(tasks["name"], tasks["count"], strict=True))
        assert counts["accepted"] >= 540
        assert counts["leased"] > 0
        methods = await browser.source("methods")
        shown = dict(zip(methods["name"], methods["text"], strict=True))
        assert "of CPU time" in shown["algebraic"]
        assert "of CPU time" in shown["recompute"]
        assert await browser.drawn("chart-flops", "#e8730c") > 100
        assert await browser.drawn("chart-bytes", "#2f6fb7") > 100
        assert await browser.drawn("chart-tasks", "#3a8f4f") > 1000
        assert await browser.drawn("chart-methods", "#3a8f4f") > 1000

        width = await page.evaluate("document.documentElement.scrollWidth")
        assert width == 1280, "the page must not scroll sideways"
        await browser.shot("page-busy")
        await page.set_viewport_size({"width": 480, "height": 900})
        assert await page.evaluate("document.documentElement.scrollWidth") == 480
        await browser.shot("page-narrow")

        assert all(url.startswith((bench.gateway.url, "data:")) for url in browser.requests), browser.requests
        assert not browser.complaints


async def test_a_gateway_that_goes_away_is_noticed_and_found_again():
    async with Bench() as bench, Browser(bench) as browser:
        port = bench.gateway.port
        await bench.gateway.stop()
        await expect(browser.page.locator("#connection")).to_contain_text("no answer from the gateway", timeout=10_000)
        bench.options["port"] = port
        await bench.__aenter__()
        await expect(browser.page.locator("#connection")).to_contain_text("gateway up for", timeout=10_000)
