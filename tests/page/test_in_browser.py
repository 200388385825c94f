"""The page in a real browser: what a person sees, and that nothing from a stranger ever runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import trio

from lab.page.browser import Chromium, Tab, missing
from lab.page.scenes import PageScene, served
from node.app.page import RunPage

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"no browser for it: {missing()}")

SIZES = [(390, 844), (820, 1100), (1600, 1000)]
IS_WHOLE = "!document.getElementById('main').hasAttribute('aria-busy')"
HAS_DRAWN = f"document.querySelectorAll('#loss-chart svg path.line').length === 1 && {IS_WHOLE}"
IS_LIVE = f"document.getElementById('fresh').textContent === 'live' && {IS_WHOLE}"


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with Chromium.started() as found:
        yield found


async def seen(scene: PageScene, look: Callable[[str], Any]) -> Any:
    async with served(RunPage(scene.source())) as url:
        return await trio.to_thread.run_sync(look, url)


def text(tab: Tab, place: str) -> str:
    return str(tab.evaluate(f"document.getElementById({place!r}).innerText"))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(("width", "height"), SIZES)
async def test_every_view_is_drawn_at_every_size_without_a_complaint(
    browser: Chromium, width: int, height: int, dark: bool
) -> None:
    def look(url: str) -> None:
        tab = browser.tab(width=width, height=height, dark=dark, phone=width < 500)
        tab.open(f"{url}/")
        tab.wait_for(HAS_DRAWN)
        tab.wait_for(IS_LIVE)
        assert tab.evaluate("document.documentElement.scrollWidth") == width
        assert text(tab, "step") == "900 of 4,000"
        assert tab.evaluate("document.querySelectorAll('#people tbody tr').length") == 6
        faded = tab.evaluate(
            "[...document.querySelectorAll('#people .off')].map((one) => one.innerText)"
        )
        assert len(faded) == 1, "the one that this peer has no link to, who may be dead"
        assert tab.evaluate("document.querySelectorAll('#board tbody tr').length") == 6
        assert tab.evaluate("document.querySelectorAll('#map circle').length") == 6
        assert tab.evaluate("document.querySelectorAll('#qr path').length") == 1
        ground = tab.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert ground == ("rgb(15, 20, 19)" if dark else "rgb(244, 243, 238)")
        assert tab.troubles == []
        assert [one.removeprefix(url).split("?")[0] for one in tab.requests] == ["/", "/events"]
        assert [text(tab, "board").count(one) for one in ("5 of 5", "4 of 5")] == [5, 1]
        assert "limited by computing: 1.9" in text(tab, "rate-more")
        assert [text(tab, "people").count(one) for one in ("cuda", "mps", "cpu")] == [3, 1, 1]

    await seen(PageScene(peers=6), look)


async def test_a_run_that_begins_says_so(browser: Chromium) -> None:
    def look(url: str) -> None:
        tab = browser.tab()
        tab.open(f"{url}/")
        tab.wait_for(IS_LIVE)
        assert "Nothing to draw yet" in text(tab, "loss-chart")
        assert "Nobody can be credited yet" in text(tab, "board-more")
        top = "document.querySelector({!r}).getBoundingClientRect().y".format
        assert tab.evaluate(f"{top('#board-more')} - {top('#h-board')}") < 60
        assert text(tab, "phase") == "preparing"
        assert tab.troubles == []

    await seen(PageScene(peers=1, steps=0), look)


CUT_NAMES = """(() => {
  const box = document.getElementById("map").getBoundingClientRect();
  const isCut = (one) => one.left < box.left - 1 || one.right > box.right + 1;
  const names = [...document.querySelectorAll("#map text")];
  return names.filter((one) => isCut(one.getBoundingClientRect())).map((one) => one.textContent);
})()"""


async def test_nothing_that_a_stranger_calls_itself_is_executed(browser: Chromium) -> None:
    def look(url: str) -> None:
        tab = browser.tab()
        tab.open(f"{url}/")
        tab.wait_for(HAS_DRAWN)
        tab.wait_for(IS_LIVE)
        assert tab.evaluate("typeof window.bad") == "undefined"
        assert tab.evaluate("document.images.length") == 0
        assert tab.evaluate("document.scripts.length") == 2
        assert "<img src=x onerror=window.bad=1>" in text(tab, "people")
        assert tab.evaluate(CUT_NAMES) == [], "the map has room for them"
        assert tab.troubles == []

    await seen(PageScene(peers=8, hostile=True), look)


KEEPS_SOURCES = """
window.sources = [];
const Real = EventSource;
window.EventSource = class extends Real { constructor(...a) { super(...a); sources.push(this); } };
"""

# 120 peers come, and three are left when the first rows of those are made
FEWER_WHILE_DRAWN = """(() => {
  const held = [], real = window.setTimeout;
  window.setTimeout = (task) => held.push(task);
  const send = (count) => sources.at(-1).onmessage({ data: JSON.stringify({ people: { more: 0,
    rows: Array.from({ length: count }, (_, i) => ({ who: `peer …${i}`, role: "trains" })) } }) });
  send(120);
  held.shift()();
  send(3);
  while (held.length) held.shift()();
  window.setTimeout = real;
  return document.querySelectorAll("#people tbody tr").length;
})()"""


async def test_a_long_list_that_is_still_drawn_does_not_replace_a_newer_short_one(
    browser: Chromium,
) -> None:
    def look(url: str) -> None:
        tab = browser.tab()
        tab.call("Page.addScriptToEvaluateOnNewDocument", source=KEEPS_SOURCES)
        tab.open(f"{url}/")
        tab.wait_for(IS_LIVE)
        assert tab.evaluate(FEWER_WHILE_DRAWN) == 3
        assert tab.troubles == []

    await seen(PageScene(peers=2, steps=5), look)


async def test_the_policy_stops_a_script_that_got_into_the_page(browser: Chromium) -> None:
    def look(url: str) -> None:
        tab = browser.tab()
        tab.open(f"{url}/")
        tab.wait_for(HAS_DRAWN)
        tab.evaluate(
            "(() => { const one = document.createElement('script');"
            " one.textContent = 'window.bad = 1'; document.body.append(one);"
            " document.body.insertAdjacentHTML('beforeend',"
            " '<img src=x onerror=\"window.bad = 1\">'); })()"
        )
        browser.listen(0.5)
        assert tab.evaluate("typeof window.bad") == "undefined"
        assert any("Content Security Policy" in one for one in tab.troubles)

    await seen(PageScene(peers=3, steps=30), look)


async def test_a_step_is_shown_without_loading_the_page_again(browser: Chromium) -> None:
    scene = PageScene(peers=4, steps=50)
    page = RunPage(scene.source())

    def opened(url: str) -> Tab:
        tab = browser.tab()
        tab.open(f"{url}/")
        tab.wait_for(IS_LIVE)
        return tab

    async with served(page) as url:
        tab = await trio.to_thread.run_sync(opened, url)
        scene.now += 2.0
        scene.step(50, 1.25)
        await trio.to_thread.run_sync(
            tab.wait_for, "document.getElementById('loss').innerText === '1.2500'"
        )
        assert text(tab, "step") == "51 of 4,000"
        tab.evaluate("document.getElementById('loss-chart').focus()")
        tab.press("End")
        assert text(tab, "loss-reading").startswith("step 51,")
        assert tab.troubles == []


async def test_a_page_says_that_it_is_old_and_goes_on_when_its_peer_is_back(
    browser: Chromium,
) -> None:
    scene = PageScene(peers=4, steps=50)

    def opened(url: str) -> Tab:
        tab = browser.tab()
        tab.open(f"{url}/")
        tab.wait_for(IS_LIVE)
        return tab

    async with served(RunPage(scene.source())) as url:
        tab = await trio.to_thread.run_sync(opened, url)
    await trio.to_thread.run_sync(tab.wait_for, "!document.getElementById('stale').hidden")
    assert "These figures are old" in text(tab, "stale")
    scene.now += 60.0
    scene.step(50, 1.5)
    async with served(RunPage(scene.source()), port=int(url.rpartition(":")[2])):
        await trio.to_thread.run_sync(tab.wait_for, "document.getElementById('stale').hidden")
        assert text(tab, "step") == "51 of 4,000"


async def test_a_login_link_opens_the_page_with_names_and_leaves_no_key_in_the_address(
    browser: Chromium,
) -> None:
    page = RunPage(PageScene(peers=4, steps=50, closed=True).source())
    has_names = "document.getElementById('people')?.innerText.includes('Grace')"

    def look(link: str) -> None:
        tab = browser.tab()
        tab.open(link)
        tab.wait_for(has_names)
        assert tab.evaluate("location.href") == link.partition("#")[0]
        assert tab.evaluate("document.cookie") == ""
        assert tab.troubles == []
        other = browser.tab()
        other.open(link)
        other.wait_for("!document.getElementById('login').hidden")
        assert "was used before" in text(other, "login")

    async with served(page) as url:
        await trio.to_thread.run_sync(look, page.link(url))


async def test_the_curve_can_be_chosen_and_read_with_the_keyboard(browser: Chromium) -> None:
    def look(url: str) -> None:
        tab = browser.tab()
        tab.open(f"{url}/")
        tab.wait_for(HAS_DRAWN)
        line = "document.querySelector('#loss-chart path.line').getAttribute('d')"
        curves = {tab.evaluate(line)}
        for name, value in (("scale", "log"), ("by", "time"), ("curve", "raw")):
            tab.evaluate(f"document.querySelector('[name={name}][value={value}]').click()")
            curves.add(tab.evaluate(line))
        assert len(curves) == 4
        tab.evaluate("document.getElementById('loss-chart').focus()")
        tab.press("End")
        assert text(tab, "loss-reading").startswith("step 900,")
        tab.press("ArrowLeft")
        assert text(tab, "loss-reading").startswith("step 899,")
        label = tab.evaluate("document.getElementById('loss-chart').getAttribute('aria-label')")
        assert label.startswith("Loss of the run by time: from ")

    await seen(PageScene(peers=4), look)


async def test_every_control_has_a_name_for_a_screen_reader(browser: Chromium) -> None:
    def look(url: str) -> None:
        tab = browser.tab()
        tab.open(f"{url}/")
        tab.wait_for(HAS_DRAWN)
        nodes = tab.call("Accessibility.getFullAXTree")["nodes"]
        wanted = {"button", "link", "radio", "image", "region", "table"}
        unnamed = [
            one["role"]["value"]
            for one in nodes
            if not one.get("ignored")
            and one.get("role", {}).get("value") in wanted - {"table"}
            and not one.get("name", {}).get("value")
        ]
        assert unnamed == []

    await seen(PageScene(peers=4, steps=50), look)


CONTRAST = """(() => {
  const channels = (colour) => (colour.match(/[\\d.]+/g) || []).map(Number);
  const light = (rgb) => [0.2126, 0.7152, 0.0722].reduce((sum, part, i) => {
    const share = rgb[i] / 255;
    return sum + part * (share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4);
  }, 0);
  const over = (above, below) => {
    const opaque = above.length > 3 ? above[3] : 1;
    return below.map((one, i) => above[i] * opaque + one * (1 - opaque));
  };
  const ground = (one) => one === null ? [255, 255, 255]
    : over(channels(getComputedStyle(one).backgroundColor), ground(one.parentElement));
  const poor = {};
  for (const one of document.body.querySelectorAll("*")) {
    const hasWords = [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!hasWords || !one.getClientRects().length) continue;
    if (one.closest("svg, script, .sr, .skip")) continue;
    const below = ground(one), style = getComputedStyle(one);
    const pair = [light(over(channels(style.color), below)), light(below)].sort((a, b) => b - a);
    const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
    if (ratio < 4.5) poor[`${one.tagName} ${one.className} ${one.id}`] = ratio.toFixed(2);
  }
  return poor;
})()"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_all_words_stand_out_from_their_ground(browser: Chromium, dark: bool) -> None:
    """As WCAG has it for normal text: by 4.5 to 1."""

    def look(url: str) -> None:
        tab = browser.tab(width=1600, dark=dark)
        tab.open(f"{url}/")
        tab.wait_for(IS_LIVE)
        for kind in ("", " warm", " bad"):
            tab.evaluate(f"document.getElementById('phase').className = 'badge{kind}'")
            assert tab.evaluate(CONTRAST) == {}

    await seen(PageScene(peers=60, steps=60), look)


async def test_a_run_of_two_hundred_peers_is_drawn_within_a_second(browser: Chromium) -> None:
    def look(url: str) -> float:
        tab = browser.tab(width=1600)
        tab.open(f"{url}/")
        tab.wait_for(HAS_DRAWN)
        assert tab.evaluate("document.querySelectorAll('#people tbody tr').length") == 200
        took = tab.evaluate(
            "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"
        )
        assert tab.troubles == []
        return float(took)

    assert (
        await seen(PageScene(peers=200, steps=3_000), look) < 10_000
    )  # on a machine with other work


async def test_the_bars_of_the_last_hour_stand_below_one_another(browser: Chromium) -> None:
    def look(url: str) -> None:
        tab = browser.tab(width=1280)
        tab.open(f"{url}/")
        tab.wait_for(IS_LIVE)
        left = (
            "[...document.querySelectorAll('.meter')].map((one) => one.getBoundingClientRect().x)"
        )
        places = tab.evaluate(left)
        assert len(places) == 6
        assert max(places) - min(places) < 1

    await seen(PageScene(peers=6), look)


async def test_a_phone_has_enough_numbers_below_the_curve(browser: Chromium) -> None:
    def look(url: str) -> None:
        tab = browser.tab(width=390, height=844, phone=True)
        tab.open(f"{url}/")
        tab.wait_for(HAS_DRAWN)
        below = "[...document.querySelectorAll('#loss-chart text')].map((one) => one.textContent)"
        assert {"200", "400", "600", "800"} < set(tab.evaluate(below))

    await seen(PageScene(peers=2), look)


async def test_only_people_who_train_have_a_rank_on_the_leaderboard(browser: Chromium) -> None:
    def look(url: str) -> None:
        tab = browser.tab()
        tab.open(f"{url}/")
        tab.wait_for(IS_LIVE)
        first = (
            "[...document.querySelectorAll('#board tbody tr')].map((one) => one.cells[0].innerText)"
        )
        assert tab.evaluate(first) == ["1", "2", "3", ""]

    await seen(PageScene(peers=4), look)
