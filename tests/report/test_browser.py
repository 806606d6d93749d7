"""The page and the live view in Chromium."""

import os
import re
import shutil
import threading
import time

import pytest

from fedsap.report import write_report
from fedsap.report.live import Server

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")
SWITCHES = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update",
    "--disable-background-networking", "--disable-sync", "--disable-dev-shm-usage", "--window-size=1280,900",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        why = "no chromium and chromedriver on this machine: the page was NOT tested in a browser"
        if os.environ.get("FEDSAP_BROWSER") == "required":
            pytest.fail(why)
        pytest.skip(why)
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for switch in (*SWITCHES, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    made = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    made.set_page_load_timeout(90)
    yield made
    made.quit()


def wait(browser, script, seconds=60):
    """The first true answer of a script."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = browser.execute_script(f"return {script}")
        if found:
            return found
        time.sleep(0.1)
    return pytest.fail(f"not true in {seconds} s: {script}")


def click(browser, css):
    browser.execute_script("document.querySelector(arguments[0]).click()", css)


@pytest.fixture
def page(browser, written):
    browser.get_log("browser")
    browser.get_log("performance")
    browser.get((written / "report.html").as_uri())
    wait(browser, "document.querySelectorAll('#curve-plot .scatterlayer .trace').length")
    return browser


def curves(browser):
    script = "[...document.getElementById('curve-plot').data].filter(t => t.meta === 'curve').map(t => t.name)"
    return browser.execute_script(f"return {script}")


def test_opens_without_errors_and_without_a_network(page):
    assert [line for line in page.get_log("browser") if line["level"] == "SEVERE"] == []
    asked = [line["message"] for line in page.get_log("performance") if "requestWillBeSent" in line["message"]]
    assert not [message for message in asked if '"url":"http' in message]
    assert page.title == "Results"


def test_a_table_sorts_with_the_keyboard(page):
    keys = pytest.importorskip("selenium.webdriver.common.keys").Keys
    rows = "document.querySelectorAll('#table-measures tbody tr:not(.block)')"
    column = f"[...{rows}].map(r => Number(r.cells[1].dataset.value))"
    head = page.find_elements("css selector", "#table-measures thead tr:last-child th")[1]
    for order, sign in (("descending", -1), ("ascending", 1)):
        head.find_element("css selector", "button").send_keys(keys.ENTER)
        values = page.execute_script(f"return {column}")
        assert values == sorted(values, key=lambda v, sign=sign: sign * v)
        assert len(values) == 3
        assert head.get_attribute("aria-sort") == order


def test_a_toggle_hides_a_curve(page):
    drawn = "document.querySelectorAll('#curve-plot .scatterlayer .trace .js-line').length"
    before = page.execute_script(f"return {drawn}")
    assert curves(page) == ["FedSAP", "FedProto", "FedAvg"]
    click(page, "input[data-method=FedProto]")
    assert curves(page) == ["FedSAP", "FedAvg"]
    wait(page, f"{drawn} < {before}")
    click(page, "input[data-method=FedProto]")
    assert "FedProto" in curves(page)
    none, every = "#toggles button:last-child", "#toggles button:nth-last-child(2)"
    click(page, none)
    assert curves(page) == []
    click(page, "input[data-method=FedAvg]")
    assert curves(page) == ["FedAvg"]
    click(page, every)
    assert len(curves(page)) == 3


def test_hover_over_a_curve_shows_its_value(page):
    page.execute_script("Plotly.Fx.hover('curve-plot', [{curveNumber: 2, pointNumber: 1}])")
    assert wait(page, "document.querySelector('#curve-plot .hoverlayer')?.textContent").strip()


@pytest.mark.parametrize("band", [True, False])
def test_pointing_between_two_rounds_shows_the_nearer_one_best_first(page, band):
    page.execute_script("const b = document.getElementById('band'); if (b.checked !== arguments[0]) b.click()", band)
    page.execute_script("document.getElementById('curve-plot').scrollIntoView({block: 'center', behavior: 'instant'})")
    place = """const p = document.getElementById('curve-plot'), l = p._fullLayout, b = p.getBoundingClientRect();
        return [b.x + l.xaxis._offset + l.xaxis.l2p(3.4), b.y + l.yaxis._offset + l.yaxis._length / 2]"""
    x, y = page.execute_script(place)
    for shift in (3, 0):
        page.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x + shift, "y": y})
        time.sleep(0.2)
    said = wait(page, "document.querySelector('#curve-plot .hoverlayer')?.textContent")
    assert said.startswith("round 4")
    values = [float(v) for v in re.findall(r"(\d+\.\d+) ±", said.removeprefix("round 4"))]
    assert len(values) == 3
    assert values == sorted(values, reverse=True)


def test_a_method_alone_fills_its_box(page):
    page.execute_script(
        "const s = document.getElementById('right'); s.value = '';s.dispatchEvent(new Event('change', {bubbles: true}))"
    )
    sizes = """['left-plot', 'right-plot'].map(id => document.getElementById(id)).filter(p => p.offsetParent)
        .map(p => [p.offsetWidth, p.querySelector('.main-svg').getBoundingClientRect().width])"""
    ((box, drawn),) = page.execute_script(f"return {sizes}")
    assert drawn == pytest.approx(box, abs=1)


def test_the_slider_moves_the_points(page):
    where = "document.querySelectorAll('#left-plot .trace .point')[3].getAttribute('transform')"
    before = wait(page, where)
    page.execute_script(
        "const s = document.getElementById('round'); s.value = 0; s.dispatchEvent(new Event('input', {bubbles: true}))"
    )
    assert wait(page, "document.getElementById('round-now').textContent") == "round 2"
    wait(page, f"{where} !== {before!r}")
    assert "round 2" in page.find_element("id", "left-title").text


def test_a_sample_shows_its_image_class_and_client(page):
    page.execute_script(
        "const s = document.getElementById('sample'); s.value = 7; s.dispatchEvent(new Event('input', {bubbles: true}))"
    )
    said = page.find_element("id", "sample-text").text
    data = page.execute_script("return JSON.parse(document.getElementById('data').textContent).explorer[0]")
    assert said.endswith(f"class {data['names'][data['labels'][7]]}, client {data['clients'][7]}")
    assert "url(" in page.find_element("id", "thumb").value_of_css_property("background-image")


def test_pointing_at_a_sample_shows_a_tip(page):
    page.execute_script("document.getElementById('left-plot').scrollIntoView({block: 'center', behavior: 'instant'})")
    box = "document.querySelectorAll('#left-plot .trace .point')[5].getBoundingClientRect()"
    x, y, width = page.execute_script(f"const b = {box}; return [b.x, b.y, b.width]")
    for shift in (3, 0):
        place = {"type": "mouseMoved", "x": x + width / 2 + shift, "y": y + width / 2}
        page.execute_cdp_cmd("Input.dispatchMouseEvent", place)
        time.sleep(0.2)
    assert "class" in wait(page, "document.getElementById('tip').textContent")
    assert "url(" in page.execute_script("return document.querySelector('#tip .thumb').style.backgroundImage")


def test_prototypes_are_stars_and_colour_goes_by_client(page):
    stars = page.execute_script("return document.getElementById('left-plot').data[1].x.length")
    assert stars == page.execute_script(
        "return JSON.parse(document.getElementById('data').textContent).explorer[0].rounds[1].stars.length"
    )
    before = page.execute_script("return document.getElementById('left-plot').data[0].marker.color.join()")
    click(page, "input[name=tint][value=client]")
    wait(page, f"document.getElementById('left-plot').data[0].marker.color.join() !== {before!r}")


def test_clients_and_reproduction(page):
    assert page.execute_script("return document.querySelectorAll('#client-table tbody tr').length") == 6
    text = page.execute_script("return document.getElementById('reproduce-list').textContent")
    assert "fedsap run --method fedsap --seed 1 --seed 2" in text
    assert '"torch"' in text


@pytest.mark.parametrize("width", [390, 1280])
def test_fits_the_width(page, width):
    size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 600}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        page.refresh()
        wait(page, "document.querySelectorAll('#curve-plot .scatterlayer .trace').length")
        assert page.execute_script("return document.documentElement.scrollWidth") <= width
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_everything_that_acts_has_a_name(page):
    nameless = """[...document.querySelectorAll('button, select, input, [role=img], [role=region]')]
        .filter(e => e.offsetParent && !e.getAttribute('aria-label') && !e.labels?.length && !e.textContent.trim())
        .map(e => e.outerHTML)"""
    assert page.execute_script(f"return {nameless}") == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_contrast(page, theme):
    page.execute_script("document.documentElement.dataset.theme = arguments[0]", theme)
    script = """
        const rgb = (c) => c.match(/[\\d.]+/g).slice(0, 3).map(Number);
        const linear = (v) => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
        const light = (c) => { const [r, g, b] = rgb(c).map(linear);
          return .2126 * r + .7152 * g + .0722 * b; };
        const paper = getComputedStyle(document.body).backgroundColor;
        return ['h1', '.muted', 'nav a', 'td strong', '.card dt'].map(css => {
          const a = light(getComputedStyle(document.querySelector(css)).color), b = light(paper);
          return (Math.max(a, b) + .05) / (Math.min(a, b) + .05); });"""
    assert min(page.execute_script(script)) >= 4.5


def test_a_report_of_one_method(browser, trained, tmp_path):
    write_report([trained / "fedsap-1"], tmp_path, ["html"])
    browser.get((tmp_path / "report.html").as_uri())
    wait(browser, "document.querySelector('#left-plot .trace .point')")
    box, drawn = browser.execute_script(
        "const p = document.getElementById('left-plot');"
        "return [p.offsetWidth, p.querySelector('.main-svg').getBoundingClientRect().width]"
    )
    assert drawn == pytest.approx(box, abs=1)
    assert not browser.find_element("id", "band").is_displayed()  # one seed


def test_the_live_view_of_an_empty_folder_says_what_to_do(browser, tmp_path):
    server = Server(tmp_path)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        browser.get(server.url)
        assert "fedsap run" in browser.find_element("id", "waiting").text
        assert not [s for s in browser.find_elements("css selector", "main section") if s.is_displayed()]
    finally:
        browser.get("about:blank")
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("which", [0, 1])
def test_a_new_round_appears_in_the_live_view(browser, trained, tmp_path, which):
    shutil.copytree(trained / "fedsap-1", tmp_path / "run", ignore=shutil.ignore_patterns("result.json", "snapshots"))
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(rows[:2]))
    server = Server(tmp_path)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        browser.get_log("browser")
        browser.get(server.url)
        rounds = "document.getElementById('curve-plot').data?.find(t => t.meta === 'curve')?.x.join()"
        wait(browser, f"{rounds} === '2'")
        browser.execute_script("window.same = true")
        focus = ("#table-measures thead tr:last-child th:nth-child(2) button", "#toggles input")[which]
        browser.execute_script("document.querySelector(arguments[0]).focus()", focus)
        with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
            file.write("".join(rows[2:]))
        wait(browser, f"{rounds} === '2,4'")
        assert browser.execute_script("return window.same")  # without reloading
        script = "return document.activeElement === document.querySelector(arguments[0])"
        assert browser.execute_script(script, focus)  # who uses the keyboard stays where they are
        assert [line for line in browser.get_log("browser") if line["level"] == "SEVERE"] == []
    finally:
        browser.get("about:blank")
        server.shutdown()
        thread.join()
        server.server_close()
