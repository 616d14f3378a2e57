"""The board in a real browser, before a scripted engine whose events are known."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from cloister.engine.replica_snapshot import ReplicaSnapshot
from cloister.policy import Credentials, KeyQuota
from cloister.server.metrics import Metrics
from cloister.types.config import ServerConfig
from cloister.types.events import Arrived, Ended, Event, KVLoaded, KVStored, Progressed, Scheduled, Stepped
from cloister.types.request import FinishReason
from tests.browser import Browser
from tests.server.running_server import RunningServer, ScriptedEngine, make_gate, says, serving_script, write_model


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = write_model(tmp_path_factory.mktemp("board_model"))
    with serving_script(path, ScriptedEngine(says("x")), config=ServerConfig(port=0, drain_timeout_s=1.0)) as server:
        yield server


@pytest.fixture
def board(browser: Browser, server: RunningServer) -> Iterator[Browser]:
    browser.open(server.url, "#board")
    browser.find(".card")
    yield browser
    complaints, _ = browser.read_logs()
    assert complaints == []
    browser.driver.get("about:blank")


def tell(server: RunningServer, *events: Event) -> None:
    """Lets the server hear what happened in its engine."""
    assert isinstance(server.engine, ScriptedEngine)
    for event in events:
        for listener in server.engine._requests._listeners:
            listener(event)


def life(request_id: str, *, gap_s: float) -> list[Event]:
    """A request whose second token is late."""
    end = Ended(request_id, 1, 0, 12.0, FinishReason.STOP, 4, 2, 0, arrival_s=10.0, first_token_s=10.5, last=True)
    tokens = [Progressed(request_id, 1, 0, at_s, 1, first=False) for at_s in (10.5, 10.5 + gap_s)]
    return [Arrived(request_id, 10.0, 4), Scheduled(request_id, 10.2, 0.2, 0, 4), *tokens, end]


def card_of(browser: Browser, title: str) -> str:
    return browser.find(f".card[aria-label='{title}']").text


def boxes(browser: Browser) -> list[tuple[int, int, int, int]]:
    """Left, top, right and bottom of every card."""
    script = """return [...document.querySelectorAll('.card')].map((card) => card.getBoundingClientRect())
        .map((box) => [box.left, box.top, box.right, box.bottom].map(Math.round))"""
    return [tuple(box) for box in browser.run(script)]


@pytest.mark.parametrize(("width", "columns"), [(1600, 4), (1280, 3), (700, 2), (360, 2)])
def test_the_cards_fill_every_row_of_the_grid(board, width, columns):
    board.resize(width, 800, phone=width < 800)
    cards = boxes(board)
    left, right = min(card[0] for card in cards), max(card[2] for card in cards)
    for top in {card[1] for card in cards}:
        row = sorted(card for card in cards if card[1] == top)
        assert len(row) in (1, columns)
        assert abs(row[0][0] - left) <= 1
        assert abs(row[-1][2] - right) <= 1


def test_no_line_leaves_its_plot_however_late_a_token_is(board, server):
    tell(server, *life("late", gap_s=9.0))
    board.wait(lambda: "s" in card_of(board, "Time between tokens").split("p90")[0].split("p50")[1])
    outside = board.run(
        "return [...document.querySelectorAll('.plot .line')]"
        ".filter((line) => { const box = line.getBBox(); return box.y < 0 || box.y + box.height > 72; }).length"
    )
    assert outside == 0
    assert board.run("return document.querySelector('.plot .grid').getAttribute('y1')") == "0", "a line marks the top"
    label = board.find(".card[aria-label='Time between tokens'] svg").get_attribute("aria-label")
    top_s = float(board.text(".card[aria-label='Time between tokens'] .axis").removesuffix(" s"))
    assert float(re.findall(r"p90 [\d.]+ s, at most ([\d.]+) s", label)[0]) <= top_s


def history_of(server: RunningServer) -> Any:
    """What has the clock of the server's past."""
    assert isinstance(server.engine, ScriptedEngine)
    (history,) = {
        observe.__self__.before_change.__self__
        for observe in server.engine._requests._listeners
        if isinstance(observe.__self__, Metrics)
    }
    return history


def test_a_page_that_is_opened_now_shows_what_happened_before(board, server):
    history = history_of(server)
    clock = history._clock
    begun_s = clock()
    for minute in range(12):
        history._clock = lambda passed_s=60.0 * (minute + 1): begun_s + passed_s  # no minute ends among what happens in it
        for number in range(10 if minute == 6 else 1):
            tell(server, *life(f"past{minute}.{number}", gap_s=0.1))
    history._clock = lambda: clock() + 60.0 * 12
    board.driver.refresh()
    board.find(".card")
    board.click(".ranges button:nth-child(2)")
    plot = ".card[aria-label='Answers per minute'] svg"
    label = board.find(plot).get_attribute("aria-label")
    assert re.fullmatch(r"Answers per minute, last 15 minutes: ended [\d.]+, at most 10", label)
    line = board.run("return document.querySelector(arguments[0] + ' .line').getAttribute('d')", plot)
    assert line.count("L") >= 10


def test_a_range_is_chosen_with_the_keyboard_and_says_so(board):
    board.run("document.querySelector('.ranges button:nth-child(3)').focus()")
    board.press(" ")
    pressed = board.run("return [...document.querySelectorAll('.ranges button')].map((e) => e.getAttribute('aria-pressed'))")
    assert pressed == ["false", "false", "true", "false"]
    assert "60 minutes ago" in card_of(board, "Requests")


def test_the_board_counts_errors_and_says_how_long_the_server_is_up(board, server):
    for _ in range(3):
        httpx.get(f"{server.url}/v1/models/none")
    board.wait(lambda: "3 × 404" in card_of(board, "Errors per minute"))
    assert re.search(r"up \d+ (s|min|h)", board.text(".board-head"))
    board.wait(lambda: re.search(r"[MG]iB\s+front", card_of(board, "Memory of the processes")))
    board.wait(lambda: re.search(r"\d\.\d\d\s+front", card_of(board, "Processors in use")))


def test_a_refusal_for_too_many_requests_is_shown(browser, tmp_path):
    credentials, key = Credentials.empty().add("ann", limits=KeyQuota(requests_per_minute=1), is_operator=True)
    gate, config = make_gate("team", credentials), ServerConfig(port=0, drain_timeout_s=1.0)
    with serving_script(write_model(tmp_path), ScriptedEngine(says("x")), gate=gate, config=config) as server:
        headers = {"Authorization": f"Bearer {key}"}
        body = {"model": "history", "prompt": "a", "max_tokens": 1}
        replies = [httpx.post(f"{server.url}/v1/completions", json=body, headers=headers).status_code for _ in range(3)]
        assert replies == [200, 429, 429]
        browser.open(server.url)
        browser.click("#open-settings")
        browser.find("#set-key").send_keys(key)
        browser.click("#settings [aria-label=Close]")
        browser.click("#go-board")
        browser.wait(lambda: "2 × 429" in card_of(browser, "Errors per minute"))
        browser.driver.get("about:blank")


@pytest.mark.parametrize("is_operator", [True, False])
def test_figures_and_tenants_are_shown_to_operators_alone(browser, tmp_path, is_operator):
    credentials, key = Credentials.empty().add("ann", is_operator=is_operator)
    gate, config = make_gate("team", credentials), ServerConfig(port=0, drain_timeout_s=1.0)
    with serving_script(write_model(tmp_path), ScriptedEngine(says("x")), gate=gate, config=config) as server:
        headers = {"Authorization": f"Bearer {key}"}
        body = {"model": "history", "prompt": "a", "max_tokens": 1}
        assert httpx.post(f"{server.url}/v1/completions", json=body, headers=headers).status_code == 200
        browser.open(server.url)
        browser.click("#open-settings")
        browser.find("#set-key").send_keys(key)
        browser.click("#settings [aria-label=Close]")
        browser.click("#go-board")
        if is_operator:
            browser.wait(lambda: "ann" in card_of(browser, "Tenants"))
        else:
            browser.wait(lambda: "An operator's key shows the figures" in browser.text(".board-head"))
            asked = [url.rpartition("/metrics")[2] for url in browser.read_logs()[1] if "/metrics" in url]
            assert asked.count("") == 1  # a refusal is not asked for again and again
            assert not {"/history", "/tenants"} & set(asked)
        assert len(browser.all(".card[aria-label=Tenants]")) == is_operator
        browser.driver.get("about:blank")


class ThreeReplicas(ScriptedEngine):
    """The client of three replicas that do not change. The engines of two are on this machine: this process, for both."""

    @property
    def processes(self) -> list[tuple[str, int]]:
        return [("engine 0", os.getpid()), ("engine 2", os.getpid())]

    def snapshots(self) -> list[ReplicaSnapshot]:
        return [
            ReplicaSnapshot(0, role="prefill", state="slow", num_requests=2, num_routed=1234),
            ReplicaSnapshot(
                1, role="decode", num_requests=5, num_waiting=1, num_used_blocks=30, num_total_blocks=40, num_routed=6,
                num_migrated=3, num_kv_loads=2,
            ),
            ReplicaSnapshot(2, role="decode", state="drained"),
        ]  # fmt: skip


def test_the_board_draws_the_fleet_and_nothing_of_one_engine(board, browser, tmp_path):
    assert browser.all(".card[aria-label=Replicas]") == []
    with serving_script(write_model(tmp_path), ThreeReplicas(says("x")), config=ServerConfig(port=0)) as server:
        browser.open(server.url, "#board")
        tiles = browser.wait(lambda: browser.texts(".replica"))
        assert [tile.split("\n")[:3] for tile in tiles] == [
            ["Replica 0", "prefill", "slow"], ["Replica 1", "decode", "running"], ["Replica 2", "decode", "drained"],
        ]  # fmt: skip
        assert tiles[0].endswith("1,234 requests so far")
        memory = r"([\d,.]+) ([MG])iB\s+engine\s+([\d,.]+) ([MG])iB\s+front"
        found = browser.wait(lambda: re.search(memory, card_of(browser, "Memory of the processes"))).groups()
        engines, front = (float(found[i].replace(",", "")) * {"M": 1, "G": 1024}[found[i + 1]] for i in (0, 2))
        assert engines == pytest.approx(2 * front, rel=0.2)
        browser.wait(lambda: re.search(r"\d\.\d\d\s+engine\s+\d\.\d\d\s+front", card_of(browser, "Processors in use")))
        for words in ("4 running, 1 waiting", "75% in use", "6 requests so far, 3 moved here, KV came 2 ×"):
            assert words in tiles[1]
        classes = browser.run("return [...document.querySelectorAll('.state')].map((e) => e.className)")
        assert classes == ["state unwell", "state well", "state"]
        widths = browser.run(
            "const width = (element) => element.getBoundingClientRect().width;"
            "return [...document.querySelectorAll('.gauge-bar')].map((bar) => width(bar.firstChild) / width(bar))"
        )
        assert widths == pytest.approx([2 / 5, 0, 4 / 5, 0.75, 0, 0], abs=0.01)
        browser.driver.get("about:blank")


def test_the_board_shows_what_a_tier_holds(browser, tmp_path):
    with serving_script(write_model(tmp_path), ScriptedEngine(says("x")), config=ServerConfig(port=0)) as server:
        stored = KVStored("disk", num_bytes=3 * 2**20, used_bytes=5 * 2**20, oldest_s=90.0)
        step = Stepped(1.0, 0.1, 1, 1, 1, 0, num_used_blocks=4, num_cached_blocks=2, num_total_blocks=8, stored=(stored,))
        tell(server, Arrived("r", 0.5, 4))
        for tier in ("disk", "host+disk", "", "host"):  # from the disk, from both, from another engine, and not from the disk
            load = KVLoaded("r", 1.0, 32, 1000, 0.25, complete=True, tier=tier)
            tell(server, step, load)
        browser.open(server.url, "#board")
        words = "4 used, 2 cached, 2 free blocks; disk: 5.0 MiB, 2 loads, the oldest block of 90.0 s"
        browser.wait(lambda: words in card_of(browser, "KV cache in use"))
        browser.driver.get("about:blank")


def test_readings_of_a_day_are_few_and_their_line_reaches_the_edge(board):
    days = """(() => { const t = new m.Timeline(m.RANGES[3]);
        for (let s = 0; s < 2 * 86400; s += 20) t.add({ samples: new Map(), atMs: s * 1000 });
        return [t.readings.length, t.last.atMs - t.readings[0].atMs >= 86400_000, t.isGap(1)]; })()"""
    num, reaches, gap = board.call("readings.js", days)
    assert 100 <= num <= 140
    assert (reaches, gap) == (True, False)


def test_a_gap_in_the_readings_is_a_gap_in_the_line(board):
    gaps = """(() => { const t = new m.Timeline(m.RANGES[1]);
        for (const s of [0, 8, 16, 400, 408]) t.add({ samples: new Map(), atMs: s * 1000 });
        return t.readings.map((_, i) => t.isGap(i)); })()"""
    assert board.call("readings.js", gaps) == [False, False, False, True, False]
