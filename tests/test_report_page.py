"""tools/report_page.html: the page that report.py makes, in a real browser. Skipped where there is none."""
import json
import os
import re
import shutil
import subprocess
import time
import unicodedata

import pytest
from test_report import episode, hostile, hostile_run, joined, made, make_run, write

import report


# The browser

class Browser:
    """Headless Chromium over its debugging pipe: JSON messages, each ended by a zero byte, on descriptors 3 and 4."""

    def __init__(self, program, home):
        to_read, self.to = os.pipe()
        self.of, from_write = os.pipe()
        wired = f'exec "$0" "$@" 3<&{to_read} 4>&{from_write}'
        self.process = subprocess.Popen(["bash", "-c", wired, program, "--headless", "--no-sandbox", "--disable-gpu",
                                         "--remote-debugging-pipe", f"--user-data-dir={home}", "about:blank"],
                                        pass_fds=(to_read, from_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_read)
        os.close(from_write)
        self.rest, self.events, self.count, self.session = b"", [], 0, {}
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = {"sessionId": self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")

    def receive(self):
        while b"\0" not in self.rest:
            got = os.read(self.of, 1 << 20)
            assert got, "the browser is gone"
            self.rest += got
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def ask(self, method, **params):
        self.count += 1
        data = json.dumps({"id": self.count, "method": method, "params": params, **self.session}).encode() + b"\0"
        while data:
            data = data[os.write(self.to, data):]
        while (answer := self.receive()).get("id") != self.count:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, path, width=1100, dark=False):
        """Load a page; what it did while loading is in `events`."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=812, deviceScaleFactor=1, mobile=width < 500)
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark
            else "light"}])
        self.events = []
        self.ask("Page.navigate", url=f"file://{path}")
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self.receive())

    def run(self, script):
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def key(self, key):
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key,
                windowsVirtualKeyCode={"Tab": 9, "Enter": 13, "ArrowRight": 39}[key],
                     **({"text": "\r"} if (key, kind) == ("Enter", "keyDown") else {}))

    def happened(self, *methods):
        return [event for event in self.events if event.get("method") in methods]


SETTLE = "new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))"  # `toggle` events come later


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if not program:
        pytest.skip("no Chromium on this machine: on Debian, apt-get install chromium")
    browser = Browser(program, tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.process.terminate()
    browser.process.wait()
    os.close(browser.to)
    os.close(browser.of)


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory):
    folder, texts = tmp_path_factory.mktemp("hostile"), hostile(1400)
    made(folder, hostile_run(folder / "<b onclick=alert(1)>run", texts),
        make_run(folder / "</title><script>forged()</script>".replace("/", "\u2215")))
    return folder / "page.html", texts


def named(text):
    """The text as the page shows it."""
    swallowed = ("[\0-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f"
                 "\ufeff\ufff9-\ufffb\U000e0000-\U000e007f\ud800-\udfff]")
    shown, marks = "", []
    for character in re.sub(swallowed, lambda found: f"\u27e8U+{ord(found[0]):04X}\u27e9", joined(report.text(text))) + "\0":
        if unicodedata.category(character).startswith("M"):
            marks.append(character)
            continue
        shown += "".join(marks[:3]) + f"\u27e8{len(marks) - 3} more marks\u27e9" * (len(marks) > 3) + character
        marks = []
    return shown[:-1]


def test_hostile_text_in_a_browser(browser, hostile_page):
    path, texts = hostile_page
    browser.open(path)
    assert browser.run("document.title") == "2 runs" and browser.run("typeof window.forged") == "undefined"
    allowed = {"HTML", "HEAD", "META", "TITLE", "STYLE", "BODY", "A", "HEADER", "H1", "P", "MAIN", "SECTION", "H2", "H3",
        "TABLE", "CAPTION",
               "THEAD", "TBODY", "TR", "TH", "TD", "DETAILS", "SUMMARY", "FIGURE", "UL", "LI", "DIV", "SCRIPT", "FORM",
               "LABEL", "INPUT",
               "SELECT", "OPTION", "NAV", "BUTTON", "SPAN", "PRE", "B", "WBR", "svg", "path", "text", "rect", "circle"}
    pages = []
    while True:
        browser.run("document.querySelectorAll('details').forEach(node => { node.open = true; })")
        browser.run(SETTLE)
        pages += browser.run("[...document.querySelectorAll('.episode')].map(node => "
                             "[...node.querySelectorAll('pre')].map(pre => pre.textContent))")
        assert set(browser.run("[...new Set([...document.querySelectorAll('*')].map(node => node.tagName))]")) <= allowed
        assert browser.run("document.querySelectorAll('script').length") == 2
        if browser.run("[...document.querySelectorAll('.pager button')].at(-1).disabled"):
            break
        browser.run("[...document.querySelectorAll('.pager button')].at(-1).click()")
    assert len(pages) == len(range(0, len(texts), 7)) + 1
    for n, shown in zip(range(0, len(texts), 7), pages):
        first, hint, action, observation = (named(texts[(n + k) % len(texts)]) for k in (3, 4, 5, 6))
        want = [first, hint, action,
            observation] if texts[(n + 4) % len(texts)] else [named(texts[(n + 3) % len(texts)] + "\n"), action, observation]
        long_task = [named(texts[n])] * (len(named(texts[n]).encode("utf-16-le")) > 200)
        assert shown[:-1] == long_task + want
    assert not browser.happened("Runtime.exceptionThrown", "Page.javascriptDialogOpening", "Log.entryAdded",
        "Page.frameAttached")
    assert [event["params"]["request"]["url"] for event
        in browser.happened("Network.requestWillBeSent")] == [f"file://{path}"]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [320, 375, 800, 1100])
def test_nothing_is_wider_than_the_screen(browser, hostile_page, width, dark):
    browser.open(hostile_page[0], width, dark)
    browser.run("document.querySelectorAll('details').forEach(node => { node.open = true; })")
    browser.run(SETTLE)
    assert browser.run("document.documentElement.scrollWidth") <= width
    wide = browser.run("[...document.querySelectorAll('body *:not(.skip, option, thead, thead *)')]"
                       ".filter(node => node.getBoundingClientRect().right > "
                       f"{width} + 1 && !node.closest('.say, .tokens, .state')).map(node => node.tagName + node.className)")
    assert wide == [], wide
    paper, ink = browser.run("[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]")
    assert (sum(map(int, re.findall(r"\d+", paper))) < sum(map(int, re.findall(r"\d+", ink)))) == dark


def test_by_keyboard(browser, tmp_path):
    run = make_run(tmp_path / "run", [episode(n) for n in range(1, 31)])
    write(run, "tokens.jsonl", [episode(30, advantage=-0.5, rows=[{"tokens": ["a", "b"], "mask": [0, 1],
        "log_ratio": [-0.25]}])])
    made(tmp_path, run)
    browser.open(tmp_path / "page.html")
    where = ("(() => { const node = document.activeElement, style = getComputedStyle(node); return [node.tagName, "
             "node.id || node.textContent.slice(0, 40), style.outlineStyle, parseFloat(style.outlineWidth)]; })()")
    seen = []
    for _ in range(40):
        browser.key("Tab")
        tag, name, style, width = browser.run(where)
        if tag == "BODY":
            break
        assert style != "none" and width >= 1, (tag, name)
        seen.append(name)
        if name.startswith("step 30, ash"):  # the last step comes first
            break
    assert seen[0] == "To the transcripts" and {"filter-task", "filter-end", "filter-enriched", "filter-from", "filter-to",
        "filter-colour"} <= set(seen)
    browser.key("Enter")
    browser.run(SETTLE)
    browser.key("Tab")
    assert browser.run("document.activeElement.className") == "tokens"
    browser.key("ArrowRight")
    browser.key("ArrowRight")
    line = browser.run("document.querySelector('.tokens').previousSibling.textContent")
    assert line == 'Token 2 of 2, "b": sampled, log-ratio -0.25'
    assert browser.run("[...document.querySelectorAll('input, select')].every(node => node.labels.length === 1)")


def test_filters_pages_and_colours(browser, tmp_path):
    ends = ["success", "failure", "turn_limit", "context_full", "env_error"]
    rollouts = [episode(1 + n // 100, f"ash/train-{n}", end=ends[n % 5], success=n % 5 == 0, hint="Hint." if n % 2 else None)
        for n in range(10_000)]
    run = make_run(tmp_path / "run", rollouts)
    tokens = [{"tokens": ["a", "b", "c"], "mask": [0, 1, 1], "log_ratio": [0.5, -1.0]}]
    write(run, "tokens.jsonl", [{**rollouts[3], "advantage": -2.0, "rows": tokens}])
    made(tmp_path, run)
    started = time.perf_counter()
    browser.open(tmp_path / "page.html")
    assert time.perf_counter() - started < 60  # a second, on a machine that does nothing else
    status = "document.querySelector('[role=status]').textContent"

    def choose(name, value):
        browser.run(f"""(() => {{
            const node = document.getElementById('filter-{name}'), value = {json.dumps(value)};
            const list = node.tagName === 'SELECT';
            if (node.type === 'checkbox') node.checked = value;
            else if (list) node.selectedIndex = [...node.options].findIndex(option => option.textContent === value);
            else node.value = value;
            node.dispatchEvent(new Event(list || node.type === 'checkbox' ? 'change' : 'input'));
        }})()""")
        return browser.run(status)

    assert browser.run(status) == "1 to 20 of 10,000 transcripts"
    assert browser.run("document.querySelectorAll('.episode').length") == 20
    browser.run("[...document.querySelectorAll('.pager button')].at(-1).click()")
    assert browser.run(status) == "21 to 40 of 10,000 transcripts"
    assert choose("end", "turn_limit") == "1 to 20 of 2,000 transcripts"
    assert choose("enriched", "enriched") == "1 to 20 of 1,000 transcripts"
    assert choose("from", "100") == "1 to 10 of 10 transcripts" and choose("to", "99") == "No transcript fits."
    assert [choose("from", ""), choose("to", ""), choose("end", "all outcomes"),
        choose("enriched", "all episodes")][-1].endswith("10,000 transcripts")
    assert choose("task", "train-999") == "1 to 11 of 11 transcripts"
    choose("task", "")
    assert choose("tokens", True) == "1 to 1 of 1 transcript"
    browser.run("document.querySelector('.episode').open = true")
    browser.run(SETTLE)
    colours = "[...document.querySelectorAll('.tokens span')].map(span => span.style.background)"
    given, one, other = browser.run(colours)
    assert given == "" and one == other != ""
    choose("colour", "log-ratio")
    given, one, other = browser.run(colours)
    assert given == "" and "plus" in one and "minus" in other and "0.275" in one and "0.55" in other
    choose("colour", "advantage")
    assert browser.run(colours)[1:] == ["rgba(var(--minus), 0.550)"] * 2
    choose("colour", "JSD weight")
    assert "This episode has no JSD weight stored" in browser.run("document.querySelector('.episode').textContent")
