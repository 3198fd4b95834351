"""The page of results in a real browser: Debian's Chromium without a window, driven by Selenium."""

import base64
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pyflatness as pf
from pyflatness.scoring.units import Row
from support.score_runs import status

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
HOSTILE = "<script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(None in (CHROMIUM, DRIVER), reason="no Chromium: apt-get install chromium chromium-driver"),
]


def scores(models: int, measures: int, layers: tuple[str, ...] = ("a", "b", "")) -> pf.results.Scores:
    draw = random.Random(0)
    rows = [
        Row(f"m{m}", layer, f"measure_{k}", draw.gauss(1, 0.2), None, "ggn", True, 20, draw.random(), 0.5, 1.0)
        for m in range(models)
        for k in range(measures)
        for layer in (layers if k == 1 else ("",))
    ]
    return pf.results.Scores((*rows, Row(HOSTILE, "", "measure_0", error=HOSTILE)), 0)


@pytest.fixture
def browser() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium: pip install 'pyflatness[browser]'")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--window-size=1400,2000"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def opened(browser: Any, path: Path) -> None:
    """Open a page and wait until its charts are drawn."""
    browser.get(path.as_uri())
    until = time.monotonic() + 120
    while browser.execute_script("return document.documentElement.dataset.drawn") != "yes":
        assert time.monotonic() < until, browser.get_log("browser")
        time.sleep(0.05)


@pytest.fixture
def page(browser: Any, tmp_path: Path) -> Any:
    scores(12, 3).to_html(tmp_path / "page.html", title="A page", exclude=["m3"])
    opened(browser, tmp_path / "page.html")
    return browser


def column(browser: Any, number: int) -> list[str]:
    """Return the cells of the first table's column in the rows that are shown."""
    return browser.execute_script(
        "return [...document.querySelectorAll('#table-1-0 tbody tr:not([hidden])')].map("
        f"row => row.cells[{number}].textContent)"
    )


def head(browser: Any, number: int) -> Any:
    return browser.find_elements("css selector", "#table-1-0 thead th")[number]


def test_rows_are_sorted_by_click_and_by_keyboard(page: Any) -> None:
    button = head(page, 4).find_element("tag name", "button")
    button.click()
    assert head(page, 4).get_attribute("aria-sort") == "ascending"
    numbers = [float(cell) for cell in column(page, 4) if cell not in ("", "failed")]
    assert numbers == sorted(numbers)
    assert len(numbers) == 12
    button.send_keys("\ue007")  # Enter
    assert head(page, 4).get_attribute("aria-sort") == "descending"
    assert [float(cell) for cell in column(page, 4) if cell not in ("", "failed")] == numbers[::-1]
    assert column(page, 4)[12] == "failed"  # behind the numbers, and empty cells last
    head(page, 0).find_element("tag name", "button").send_keys(" ")
    assert head(page, 4).get_attribute("aria-sort") is None
    assert column(page, 0)[-3:] == ["m9", "m10", "m11"]  # numbers in names count as numbers


def test_rows_are_filtered(page: Any) -> None:
    from selenium.webdriver.support.ui import Select

    form = page.find_element("css selector", "form.filter[data-table=table-1-0]")
    status = form.find_element("css selector", "[role=status]")
    assert status.text == "13 of 37 rows"  # the networks
    assert {*column(page, 1)} == {"network"}
    Select(form.find_element("name", "layer")).select_by_visible_text("all")
    assert status.text == "37 of 37 rows"
    form.find_element("name", "words").send_keys("M1")
    assert {*column(page, 0)} == {"m1", "m10", "m11"}
    assert status.text == "9 of 37 rows"
    Select(form.find_element("name", "layer")).select_by_visible_text("a")
    assert column(page, 1) == ["a"] * 3
    Select(form.find_element("name", "measure")).select_by_visible_text("measure_1")
    heads = page.find_elements("css selector", "#table-1-0 thead th")
    shown = [cell.text.split()[0] for cell in heads if cell.is_displayed()]
    assert "measure_1" in shown
    assert not {"measure_0", "measure_2"} & {*shown}


def test_a_point_says_what_it_is(page: Any) -> None:
    from selenium.webdriver import ActionChains

    point = page.find_element("css selector", "#chart-0-0 .mark-symbol path[aria-roledescription]")
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", point)
    ActionChains(page).move_to_element(point).perform()
    tooltip = page.find_element("id", "vg-tooltip-element")
    assert "model" in tooltip.text
    assert "loss" in tooltip.text


def test_of_many_charts_one_is_chosen(browser: Any, tmp_path: Path) -> None:
    from selenium.webdriver.support.ui import Select

    scores(6, 8).to_html(tmp_path / "page.html")
    opened(browser, tmp_path / "page.html")
    choice = browser.find_element("css selector", ".choice select")
    assert choice.accessible_name.strip() == "Chart"

    def shown() -> list[str]:
        boxes = browser.find_elements("css selector", "section[aria-labelledby=section-0] .chart")
        return [box.find_element("css selector", ".role-title-text").text for box in boxes if box.is_displayed()]

    networks = [f"measure_{k}{' network' if k == 1 else ''}" for k in range(8)]
    assert shown() == ["measure_0"]
    Select(choice).select_by_visible_text("measure_5")
    time.sleep(0.5)
    assert shown() == ["measure_5"]
    Select(choice).select_by_visible_text("all")
    time.sleep(2)
    assert shown() == [*networks, "measure_1 a", "measure_1 b"]


def test_nothing_of_a_name_runs(page: Any) -> None:
    assert page.title == "A page"
    assert page.find_elements("css selector", "main img") == []
    severe = [entry for entry in page.get_log("browser") if entry["level"] == "SEVERE"]
    assert severe == []


def test_it_prints(page: Any, tmp_path: Path) -> None:
    pdf = base64.b64decode(page.print_page())
    assert pdf.startswith(b"%PDF")
    assert len(pdf) > 20_000


def colours(browser: Any) -> dict[str, str]:
    """Return the colours of the page, and of the letters and the ground of its first chart."""
    return browser.execute_script(
        "const of = (where) => getComputedStyle(document.querySelector(where));"
        "return {letters: of('#chart-0-0 .role-axis-label text').fill, ground: of('#chart-0-0 svg').backgroundColor,"
        " page: of('body').backgroundColor, text: of('body').color}"
    )


def test_charts_have_the_colours_of_the_page_also_on_paper(browser: Any, tmp_path: Path) -> None:
    """What was drawn on a dark screen was printed in white letters on white paper."""
    scores(12, 3).to_html(tmp_path / "page.html")
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    opened(browser, tmp_path / "page.html")
    dark = colours(browser)
    assert (dark["letters"], dark["ground"]) == (dark["text"], dark["page"])
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    paper = colours(browser)
    assert (paper["letters"], paper["ground"]) == (paper["text"], paper["page"])
    assert paper["page"] == "rgb(255, 255, 255)" != dark["page"]
    browser.execute_script("dispatchEvent(new Event('afterprint'))")
    assert colours(browser) == dark


def test_tables_are_made_smaller_for_paper(browser: Any, tmp_path: Path) -> None:
    """Columns that a window scrolls to were cut off in print."""
    scores(3, 20).to_html(tmp_path / "page.html")
    opened(browser, tmp_path / "page.html")
    zoom = "return document.querySelector('#table-1-0').style.zoom"
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert 0.2 < float(browser.execute_script(zoom)) < 0.8
    browser.execute_script("dispatchEvent(new Event('afterprint'))")
    assert browser.execute_script(zoom) == ""


@pytest.mark.parametrize("width", [400, 800, 1400])
def test_nothing_sticks_out_of_the_window(browser: Any, tmp_path: Path, width: int) -> None:
    scores(12, 20).to_html(tmp_path / "page.html")
    metrics = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    opened(browser, tmp_path / "page.html")
    sides = "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    assert len({*browser.execute_script(sides)}) == 1
    assert (
        browser.execute_script("return document.querySelector('#chart-0-0 svg').getBoundingClientRect().right") < width
    )


def test_it_is_a_table_without_javascript(browser: Any, tmp_path: Path) -> None:
    scores(3, 2).to_html(tmp_path / "page.html")
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    browser.get((tmp_path / "page.html").as_uri())
    table = browser.find_element("id", "table-1-0")
    assert table.is_displayed()
    assert "m2" in table.text
    assert not browser.find_element("css selector", "form.filter").is_displayed()
    assert "need JavaScript" in browser.find_element("tag name", "main").text


LOSS = nn.CrossEntropyLoss()
DATA = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)).double(), torch.arange(20) % 3


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double().eval()


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """Two spectra, two landscapes and two histories by name; the second spectrum's name would be HTML."""
    spectra = {
        name: pf.spectrum(network(seed), LOSS, DATA, k=2 + seed, density=True, probes=2, steps=8)
        for seed, name in enumerate(["plain", HOSTILE])
    }
    planes = {
        name: pf.landscape(network(seed), LOSS, DATA, points=(4, 3 + seed))
        for seed, name in enumerate(["plain", HOSTILE])
    }
    histories = {"first": pf.results.History(), "second": pf.results.History()}
    for place, history in enumerate(histories.values()):
        for step in range(3):
            history.add(pf.measure(network(3 * place + step), LOSS, DATA, measures="trace"), step=step)
    return {"spectra": spectra, "planes": planes, "histories": histories}


@pytest.fixture(scope="module")
def written(results: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "runs.sqlite"
    pf.score({"plain": network(0), HOSTILE: network(1)}, LOSS, DATA, store=path)
    for kind in ("spectra", "planes", "histories"):
        for name, result in results[kind].items():
            pf.add_to_store(path, name, result)
    assert status("report", str(path), "--out", str(path.with_name("page.html")), "--title", "A page") == 0
    return path.with_name("page.html")


def chart(browser: Any, title: str, number: int = 0) -> Any:
    """Return a chart of the section with this title, in the middle of the window."""
    (section,) = [one for one in browser.find_elements("tag name", "section") if one.text.startswith(title)]
    found = section.find_elements("css selector", ".chart")[number]
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", found)
    return found


def tooltip(browser: Any, mark: Any) -> dict[str, str]:
    """Return what is said where the pointer rests on a mark."""
    from selenium.webdriver import ActionChains

    ActionChains(browser).move_to_element(mark).move_by_offset(1, 0).perform()  # a pointer that comes to rest
    time.sleep(0.2)
    rows = browser.find_elements("css selector", "#vg-tooltip-element tr")
    cells = [row.find_elements("tag name", "td") for row in rows]
    return {key.text.rstrip(":"): value.text for key, value in cells}


def chooser(drawn: Any) -> Any:
    from selenium.webdriver.support.ui import Select

    return Select(drawn.find_element("css selector", ".vega-bind select"))


def test_a_spectrum_is_chosen(browser: Any, written: Path, results: dict[str, Any]) -> None:
    opened(browser, written)
    drawn = chart(browser, "Spectra")
    choice = chooser(drawn)
    assert [option.text for option in choice.options] == [*results["spectra"]]
    element = drawn.find_element("css selector", ".vega-bind select")
    assert element.accessible_name.strip() == "Show"
    before = drawn.find_element("css selector", ".mark-line path").get_attribute("d")
    for name, spectrum in results["spectra"].items():
        choice.select_by_visible_text(name)
        time.sleep(0.2)
        ticks = drawn.find_elements("css selector", ".mark-rect path[aria-roledescription]")
        assert len(ticks) == len(spectrum.eigenvalues)
        said = tooltip(browser, ticks[0])
        assert said["name"] == name
        assert float(said["eigenvalue"]) == pytest.approx(float(spectrum.eigenvalues[0]), rel=1e-6)
    assert drawn.find_element("css selector", ".mark-line path").get_attribute("d") != before
    element.send_keys("\ue013")  # arrow up
    time.sleep(0.2)
    assert drawn.find_element("css selector", ".mark-line path").get_attribute("d") == before
    assert browser.title == "A page"


def test_a_landscape_is_chosen(browser: Any, written: Path, results: dict[str, Any]) -> None:
    opened(browser, written)
    drawn = chart(browser, "Landscapes")
    for name, plane in results["planes"].items():
        chooser(drawn).select_by_visible_text(name)
        time.sleep(0.2)
        points = drawn.find_elements("css selector", ".mark-rect path[aria-roledescription]")
        assert len(points) == plane.losses.numel()
        said = tooltip(browser, points[0])
        assert said["name"] == name
        assert float(said["loss"]) == pytest.approx(float(plane.losses[0, 0]), rel=1e-5)


def test_a_history_is_read(browser: Any, written: Path, results: dict[str, Any]) -> None:
    opened(browser, written)
    drawn = chart(browser, "Training")
    choice = chooser(drawn)
    assert [option.text for option in choice.options] == ["0", "2", "network"]
    choice.select_by_visible_text("2")
    time.sleep(0.2)
    points = drawn.find_elements("css selector", ".mark-symbol path[aria-roledescription]")
    said = [tooltip(browser, point) for point in points if "training: " in point.get_attribute("aria-label")]
    found = {(one["training"], int(one["step"])): float(one["trace"]) for one in said if one["layer"] == "2"}
    for name, history in results["histories"].items():
        for record in history:
            value = record.reports["live"]["2", "trace"].value
            assert found[name, record.step] == pytest.approx(value, rel=1e-6)


def test_results_are_tables_without_javascript(browser: Any, written: Path, results: dict[str, Any]) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    browser.get(written.as_uri())
    text = browser.find_element("tag name", "main").text
    assert f"{float(results['spectra']['plain'].eigenvalues[0]):.4g}" in text
    assert f"{float(results['planes']['plain'].losses.max()):.4g}" in text


def test_how_long_a_thousand_models_take(browser, tmp_path, record_property, capsys):
    scores(1000, 20, ("",)).to_html(tmp_path / "page.html", interval="fisher")
    began = time.perf_counter()
    browser.get((tmp_path / "page.html").as_uri())
    loaded = time.perf_counter() - began
    opened_after = browser.execute_script("return performance.timing.loadEventEnd - performance.timing.navigationStart")
    status = browser.find_element("css selector", "form[data-table=table-1-0] [role=status]")
    assert status.text == "1001 of 1001 rows"
    with capsys.disabled():
        print(f"\n1,000 models x 20 measures: loaded in {opened_after / 1000:.2f} s, {loaded:.2f} s for the driver")
