"""The dashboard as a browser shows it: what a server says, and what somebody else has named."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from kvtier.obs.stats import RemoteStats, TenantCounters
from kvtier.types import MissReason, Tier
from kvtier_server.counters import Counters
from tests.lib.browser import browsing, needs_browser
from tests.lib.told_server import ADDRESS, GIB, ToldServer, tier, times

pytestmark = needs_browser

MIB = 1 << 20
POLL_MS = 2000
#: WCAG 2.2, success criterion 1.4.3.
CONTRAST_MIN = 4.5
DASH = "\N{EN DASH}"
PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


@contextmanager
def opened(browser: Browser, server: ToldServer, **options: Any) -> Iterator[Page]:
    """A page whose clock stands still; fails when its script raised or its policy was broken."""
    context = browser.new_context(**{"viewport": DESKTOP, **options})
    server.serve(context)
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "console",
        lambda said: wrong.append(said.text) if "Failed to load" not in said.text else None,
    )
    page.clock.install(time=0)
    page.clock.pause_at(1)
    page.goto(f"{ADDRESS}/")
    yield page
    context.close()
    assert wrong == []


def poll(page: Page) -> None:
    """Let so much time pass that it asks once more."""
    with page.expect_event("requestfinished"):
        page.clock.run_for(POLL_MS)


def state(page: Page, text: str) -> None:
    expect(page.get_by_role("status")).to_have_text(text)


def busy() -> ToldServer:
    """Four minutes of traffic: of every ten objects DRAM gave six, disk three, nobody one."""
    server = ToldServer(remotes=(RemoteStats(0, "redis", "slow", "no answer in 5 s"),))
    for step in range(25):
        dram = tier(
            Tier.DRAM, hits=60 * step, misses={MissReason.ABSENT: 40 * step},
            written_bytes=step * 100 * MIB, evicted_chunks=7 * step,
        )  # fmt: skip
        disk = tier(
            Tier.DISK, hits=30 * step, misses={MissReason.ABSENT: 10 * step},
            used_bytes=GIB, read_bytes=step * 400 * MIB, written_bytes=step * 100 * MIB,
            read_latency=times(*[0.004] * step, *[0.2] * (step // 8)),
        )  # fmt: skip
        remote = tier(Tier.REMOTE, misses={MissReason.UNAVAILABLE: 12 * step}, state="slow")
        server.uptime_s = 10.0 * step + 1
        server.tiers = (dram, disk, remote)
        server.counters = Counters(
            reads=90 * step, absent=10 * step, read_bytes=step * 10_000_000_000
        )
        server.note()
    server.tenants = {
        "search": TenantCounters(
            Counter({Tier.DRAM: 1400, Tier.DISK: 700}),
            Counter(
                {
                    (Tier.DRAM, MissReason.ABSENT): 900,
                    (Tier.DISK, MissReason.ABSENT): 200,
                    (Tier.REMOTE, MissReason.ABSENT): 30,
                    (Tier.REMOTE, MissReason.UNAVAILABLE): 120,
                }
            ),
        ),
        "chat": TenantCounters(Counter({Tier.DRAM: 40})),
    }
    server.held_bytes = {"search": 3 * GIB, "idle": GIB}
    return server


def rows_of(page: Page, place: str) -> list[list[str]]:
    rows = page.locator(f"#{place} tbody tr").all()
    return [row.locator("th, td").all_inner_texts() for row in rows]


def test_a_fresh_page_shows_what_the_server_remembers(browser: Browser) -> None:
    with opened(browser, busy()) as page:
        state(page, "degraded")
        hits = page.get_by_role("img", name=re.compile("^DRAM 60 %, Disk 30 %, Remote 0 %$"))
        expect(hits).to_have_count(1)
        expect(hits.locator("polygon")).to_have_count(3)
        corners = (hits.locator("polygon.dram").get_attribute("points") or "").split()
        heights = [float(corner.split(",")[1]) for corner in corners]
        assert min(heights) == 40.0
        assert max(heights) == 100.0
        tiles = page.locator("#tiles dd").all_inner_texts()
        assert tiles == ["90 %", "1.00 GB/s", "0 GB/s", "4.00 GiB", "168", "5"]
        expect(page.locator("#read .legend")).to_have_text("Clients 1.00 GB/sDisk 41.9 MB/s")


def test_tiers_say_how_full_and_how_quick_they_are(browser: Browser) -> None:
    server = busy()
    with opened(browser, server) as page:
        disk = page.get_by_role("article", name="Disk")
        expect(disk.get_by_role("meter", name="Disk in use")).to_have_attribute(
            "aria-valuenow", "25"
        )
        expect(page.get_by_role("meter", name="DRAM in use")).to_have_attribute(
            "aria-valuenow", "75"
        )
        told = server.tiers[1].counters.read_latency
        ((what, *cells),) = rows_of(page, "tiers article.disk")
        seen = [float(cell.removesuffix(" ms")) for cell in cells]
        assert what == "Read"
        wanted = [1e3 * (told.quantile(share) or 0) for share in (0.5, 0.9, 0.99)]
        assert seen == pytest.approx(wanted, rel=5e-3)
        remote = page.get_by_role("article", name="Remote")
        expect(remote.locator(".pill")).to_have_text("slow")
        expect(remote.get_by_role("meter")).to_have_count(0)


def test_misses_namespaces_and_remotes_are_listed(browser: Browser) -> None:
    with opened(browser, busy()) as page:
        state(page, "degraded")
        misses = [row[:3] for row in rows_of(page, "misses")]
        assert misses == [
            ["absent", "DRAM", "960"], ["unavailable", "Remote", "288"], ["absent", "Disk", "240"]
        ]  # fmt: skip
        assert rows_of(page, "names") == [
            ["search", "2,100", "150", "3.00 GiB"],
            ["chat", "40", "0", "0 B"],
            ["idle", "0", "0", "1.00 GiB"],
        ]
        assert rows_of(page, "remotes") == [["0 redis", "slow", "no answer in 5 s"]]


def test_an_empty_server_says_that_it_is_empty(browser: Browser) -> None:
    with opened(browser, ToldServer(tiers=(tier(Tier.DRAM, used_bytes=0),))) as page:
        state(page, "ok")
        for text in (
            "Nothing has been asked for yet.",
            "No misses in this time.",
            "Nobody has asked for anything yet.",
            "No remote is set up.",
        ):
            expect(page.get_by_text(text)).to_be_visible()
        assert page.locator("#tiles dd").first.inner_text() == DASH


def test_it_looks_again_and_again(browser: Browser) -> None:
    server = busy()
    with opened(browser, server) as page:
        state(page, "degraded")
        server.uptime_s += 2
        server.tiers = server.tiers[:2]
        server.remotes = ()
        poll(page)
        state(page, "ok")
        server.uptime_s += 2
        server.draining = True
        poll(page)
        state(page, "draining")
        assert server.asked.count("/v1/history") == 1


def test_a_server_that_goes_and_comes_back_is_told_of(browser: Browser) -> None:
    server = busy()
    with opened(browser, server) as page:
        state(page, "degraded")
        server.away = True
        page.clock.run_for(POLL_MS)
        state(page, "no answer")
        alert = page.get_by_role("alert")
        expect(alert).to_contain_text("The server has not answered since")
        expect(page.get_by_role("article", name="DRAM")).to_be_visible()
        # It was started anew: what it counted before is of another life.
        server.away = False
        server.uptime_s = 1.0
        server.counters = Counters()
        server.tiers = (tier(Tier.DRAM),)
        server.history = ToldServer().history
        page.clock.run_for(POLL_MS)
        state(page, "ok")
        expect(alert).to_be_hidden()
        expect(page.get_by_text("Nothing has been asked for yet.")).to_be_visible()
        assert server.asked.count("/v1/history") == 2


def test_a_server_that_never_answers_is_told_of(browser: Browser) -> None:
    server = ToldServer()
    with opened(browser, server) as page:
        state(page, "ok")
        server.away = True
        page.clock.run_for(POLL_MS)
        state(page, "no answer")
        assert page.title() == "KVTier: no answer"


def test_what_others_have_named_is_text_and_runs_nothing(browser: Browser) -> None:
    hostile = "<script>window.ran = 1</script><img src=x onerror='window.ran = 2'>"
    server = busy()
    server.tenants = {hostile: TenantCounters(Counter({Tier.DRAM: 1}))}
    server.held_bytes = {f"{hostile}2": 1, "__proto__": 2}
    server.remotes = (RemoteStats(0, hostile, hostile, hostile),)
    server.tiers = (replace(server.tiers[0], state=hostile, detail=hostile, codec=hostile),)
    with opened(browser, server) as page:
        expect(page.locator("#names")).to_contain_text(hostile)
        expect(page.locator("#remotes")).to_contain_text(hostile)
        assert page.evaluate("window.ran") is None
        assert page.locator("script").count() == 1
        assert page.locator("img[src]").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_policy_lets_nothing_else_run_or_leave(browser: Browser) -> None:
    server = ToldServer()
    context = browser.new_context()
    server.serve(context)
    page = context.new_page()
    page.goto(f"{ADDRESS}/")
    state(page, "ok")
    page.evaluate(
        """() => {
            window.broken = [];
            document.addEventListener("securitypolicyviolation", (e) =>
                window.broken.push(e.effectiveDirective));
            const script = document.createElement("script");
            script.textContent = "window.ran = 1";
            document.body.append(script);
            const style = document.createElement("style");
            style.textContent = "body { display: none }";
            document.body.append(style);
            fetch("http://elsewhere.test/").catch(() => {});
            document.body.append(Object.assign(new Image(), { src: "http://elsewhere.test/i" }));
        }"""
    )
    page.wait_for_function("window.broken.length >= 4")
    assert page.evaluate("window.ran") is None
    broken = page.evaluate("window.broken.sort()")
    assert broken == ["connect-src", "img-src", "script-src-elem", "style-src-elem"]
    assert not any("elsewhere" in path for path in server.asked)
    context.close()


def test_it_asks_for_its_figures_and_nothing_else(browser: Browser) -> None:
    server = busy()
    with opened(browser, server) as page:
        state(page, "degraded")
    assert set(server.asked) == {"/", "/v1/stats", "/v1/history", "/v1/namespaces"}


def test_a_token_is_asked_for_and_stays_in_the_tab(browser: Browser) -> None:
    server = busy()
    server.token = "the-secret"
    with opened(browser, server) as page:
        state(page, "locked")
        expect(page.locator("#figures")).to_be_hidden()
        field = page.get_by_label("Token")
        expect(field).to_be_focused()
        expect(field).to_have_attribute("type", "password")
        for wrong in ("another", "not ä header"):
            field.fill(wrong)
            page.get_by_role("button", name="Show the figures").click()
            expect(page.get_by_text("The server does not know this token.")).to_be_visible()
            expect(field).to_have_value("")
        field.fill("the-secret")
        field.press("Enter")
        state(page, "degraded")
        expect(field).to_be_hidden()
        assert page.evaluate("[localStorage.length, document.cookie, location.href]") == [
            0, "", f"{ADDRESS}/"
        ]  # fmt: skip
        page.reload()
        state(page, "degraded")
        page.get_by_role("button", name="Forget the token").click()
        state(page, "locked")
        assert page.evaluate("JSON.stringify(sessionStorage)").find("the-secret") < 0
        assert "the-secret" not in page.content()
    assert not any("the-secret" in path for path in server.asked)


CONTRASTS = """() => {
    const light = (c) => c <= 10 ? c / 3294.6 : ((c / 255 + .055) / 1.055) ** 2.4;
    const luminance = ([r, g, b]) => .2126 * light(r) + .7152 * light(g) + .0722 * light(b);
    const parts = (text) => text.match(/[\\d.]+/g).map(Number);
    const behind = (element) => {
        for (let at = element; at; at = at.parentElement) {
            const found = parts(getComputedStyle(at).backgroundColor);
            if (found.length === 3 || found[3] === 1) return found;
        }
        return null;
    };
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    const found = [];
    while (walker.nextNode()) {
        const element = walker.currentNode.parentElement;
        if (!walker.currentNode.textContent.trim() || !element.checkVisibility()) continue;
        const [a, b] = [parts(getComputedStyle(element).color), behind(element)].map(luminance);
        const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
        found.push([Math.round(ratio * 100) / 100, walker.currentNode.textContent.trim()]);
    }
    return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_everything_is_readable(browser: Browser, scheme: str, viewport: dict[str, int]) -> None:
    """Nothing lies beyond the screen's edge, and every text stands out from what is behind it."""
    server = busy()
    server.tenants |= {"a-name-without-a-break-" * 6: TenantCounters(Counter({Tier.DRAM: 5}))}
    with opened(browser, server, viewport=viewport, color_scheme=scheme) as page:
        state(page, "degraded")
        assert page.evaluate("document.documentElement.scrollWidth") == viewport["width"]
        texts = page.evaluate(CONTRASTS)
        assert len(texts) > 50
        assert [text for text in texts if text[0] < CONTRAST_MIN] == []
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(13, 18, 24)"
        assert dark == (scheme == "dark")


def test_every_part_has_a_name(browser: Browser) -> None:
    with opened(browser, busy()) as page:
        state(page, "degraded")
        for name in (
            "Hit rate by tier", "Read", "Written", "Tiers", "Misses by reason", "Top namespaces",
            "Remotes", "Under way, and at the door",
        ):  # fmt: skip
            expect(page.get_by_role("region", name=name, exact=True)).to_have_count(1)
        unnamed = page.locator("svg:not([aria-label]), [role=meter]:not([aria-label])")
        assert unnamed.count() == 0
        assert page.locator("th:not([scope])").count() == 0
