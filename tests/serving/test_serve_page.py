"""The page of `realm serve` in a real browser: what people see, type and hear, and that passages stay text.

Needs `pip install '.[browser]'` and a Chromium (Debian's, or `playwright install chromium`); skipped without.
"""

import contextlib
import json
import os
import shutil
import socket
import threading
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
import uvicorn
from tiny_run import PEOPLE, question

from realm_jax.eval.format import probability
from realm_jax.serving.app import Limits, make_app
from realm_jax.serving.service import Service

api = pytest.importorskip("playwright.sync_api")
expect = api.expect

QUESTION, OTHER = question(3)["question"], question(4)["question"]
BLANK = "Ada Almgren was born in ___."
FIELD, DONE = "A question, or a sentence with a blank", "#status.unseen:not(:empty)"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


# ---- a service, a browser, and replies as they may come


@contextlib.contextmanager
def served(service, **options):
    """The address of a service in a thread."""
    config = uvicorn.Config(make_app(service, Limits(most=2, every=0), **options), log_config=None, lifespan="on")
    server, listening = uvicorn.Server(config), socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def service(trained_run):
    made = Service(trained_run.workdir, {}, most=2)
    made.warm_up(threading.Event())
    return made


@pytest.fixture(scope="module")
def address(service):
    with served(service) as found:
        yield found


@pytest.fixture(scope="module")
def browser():
    with api.sync_playwright() as playwright:
        program = next(filter(None, map(shutil.which, BROWSERS)), playwright.chromium.executable_path)
        if not Path(program).exists():
            pytest.skip("no Chromium is installed")
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium has none for root
        with contextlib.closing(playwright.chromium.launch(executable_path=program, args=sandbox)) as browser:
            yield browser


@contextlib.contextmanager
def opened(browser, address, **options):
    """A new tab at an address. Whatever is done there must not raise, nor reach for another origin."""
    with contextlib.closing(browser.new_context(base_url=address, **options)) as context:
        context.set_default_timeout(20_000)
        page, wrong = context.new_page(), []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: wrong.append(said.text) if "Security Policy" in said.text else None)
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        page.on("request", lambda asked: None if asked.url.startswith((address, "data:")) else wrong.append(asked.url))
        page.goto("/")
        yield page
        assert not wrong


@pytest.fixture
def page(browser, address):
    with opened(browser, address) as page:
        yield page


def post(address: str, path: str, body: dict) -> dict:
    """What the service replies to a program."""
    headers = {"content-type": "application/json"}
    with urlopen(Request(address + path, json.dumps(body).encode(), headers)) as reply:
        return json.load(reply)


def gives(page, path: str, body: dict, status: int = 200, **headers: str) -> None:
    """From now on a path replies this."""
    page.unroute(f"**{path}")
    page.route(f"**{path}", lambda route: route.fulfill(status=status, json=body, headers=headers))


def candidate(text: str = "It is Kifik.", span: tuple[int, int] | None = (6, 11), **fields) -> dict:
    found = {"id": "a-1", "part": 0, "title": "Title", "ranks": {"vectors": 1}, "probability": 0.75, "text": text}
    read = {} if span is None else {"answer": text[slice(*span)], "span": list(span)}
    return found | read | fields


def answer(*candidates: dict, **fields) -> dict:
    """A reply of /ask, which answers from the first candidate."""
    first = candidates[0]
    passage = {name: first[name] for name in ("id", "part", "title", "span", "text")}
    best = {"answer": first["answer"], "probability": 0.5, "passage": passage}
    measured = {"exact_match": 0.876, "recall@5": 0.5, "on": "development questions"}
    reply = {"question": "q", "nbest": [best], "candidates": candidates, "measured": measured}
    return best | reply | fields


def inspected(*passages: tuple, **fields) -> dict:
    """A reply of /inspect; passages: (id, prior, likelihood, text)."""
    total = sum(prior * likelihood for _, prior, likelihood, _ in passages)
    rows = []
    for key, prior, likelihood, text in passages:
        posterior = prior * likelihood / total if total else None
        gain = None if posterior is None else posterior - prior
        numbers = {"prior": prior, "likelihood": likelihood, "posterior": posterior, "gain": gain}
        rows.append({"id": key, "part": 0, "title": f"On {key}" if key else "", "text": text} | numbers)
    named = {"text": "q", "task": "realm", "step": 1234, "answer": "Kifik", "probability": total}
    return named | {"alone": 0.01, "held": 0.9, "others": [], "passages": rows} | fields


TABLE = inspected(("a", 0.5, 0.9, "It is Kifik."), ("b", 0.3, 1.1e-14, "It is not."), (None, 0.2, 0.125, ""))


def ask(page, text: str = "q") -> None:
    page.get_by_label(FIELD).fill(text)
    page.get_by_label(FIELD).press("Enter")


def explained(page, record: dict, reply: dict | None = None) -> None:
    """Ask, and ask why."""
    gives(page, "/ask", reply or answer(candidate()))
    gives(page, "/inspect", record)
    ask(page)
    page.get_by_role("button", name="Why this answer?").click()
    expect(page.get_by_role("heading", name="Why")).to_be_visible()


# ---- what a run answers


def test_a_question_gets_its_answer_with_passages(page, address):
    found = post(address, "/ask", {"question": QUESTION})
    ask(page, QUESTION)
    told = page.get_by_role("region", name="Answer")
    expect(told.locator("strong")).to_have_text(found["answer"])
    expect(told.locator(".value").first).to_have_text(f"probability {probability(found['probability'])}")
    start, end = found["passage"]["span"]
    expect(told.locator("blockquote mark")).to_have_text(found["passage"]["text"][start:end])
    expect(told.locator("li .label")).to_have_text([one["answer"] for one in found["nbest"][1:]])
    read = page.get_by_role("region", name="Passages that were read")
    expect(read.locator("li h3")).to_have_text([one["title"] for one in found["candidates"]])
    expect(read.locator("li .value")).to_have_text([probability(one["probability"]) for one in found["candidates"]])
    expect(read.locator("mark")).to_have_text([one["answer"] for one in found["candidates"]])
    expect(page.locator(DONE)).to_contain_text(f"Answer: {found['answer']}")
    assert page.title() == f"{QUESTION} · REALM"


def test_an_answer_is_explained_and_so_is_another(page, address):
    ask(page, QUESTION)
    why = page.get_by_role("button", name="Why this answer?")
    why.click()
    for chosen in ("", "1807"):
        if chosen:
            page.get_by_label("Explain another answer").fill(chosen)
            page.get_by_label("Explain another answer").press("Enter")
        record = post(address, "/inspect", {"text": QUESTION} | ({"answer": chosen} if chosen else {}))
        expect(page.locator("#verdict strong").first).to_have_text(record["answer"])
        expect(page.locator("tbody .title")).to_have_text([one["title"] for one in record["passages"]])
    assert why.get_attribute("aria-expanded") == "true"
    why.click()
    expect(page.get_by_role("table")).to_be_hidden()


def test_a_blank_is_filled_and_explained_at_once(page, address):
    ask(page, BLANK)
    record = post(address, "/inspect", {"text": BLANK})
    expect(page.locator("#found .sentence")).to_have_text(BLANK.replace("___", record["answer"]))
    expect(page.locator("#others .label")).to_have_text([one["answer"] for one in record["others"]])
    expect(page.locator("tbody .title")).to_have_text([one["title"] or "No passage" for one in record["passages"]])
    expect(page.get_by_role("button", name="Why this answer?")).to_be_hidden()
    with page.expect_request("**/inspect") as asked:
        page.get_by_label("Tokens in the blank").fill("3")
        page.get_by_role("button", name="Fill again").click()
    assert asked.value.post_data_json == {"text": BLANK, "pieces": 3}
    ask(page, "Ada Almgren was born in [1800].")
    expect(page.locator("#found mark")).to_have_text("1800")
    expect(page.get_by_label("Tokens in the blank")).to_be_hidden()


def test_the_footer_says_which_model_answers(page, service, trained_run):
    assert service.facts()["reader"] == "questions"
    expect(page.get_by_role("contentinfo")).to_contain_text(trained_run.workdir.name)
    expect(page.get_by_role("contentinfo")).to_contain_text("qa, step 2")
    expect(page.get_by_role("banner")).to_contain_text(f"{len(PEOPLE)} passages")


def test_the_address_holds_the_question(page):
    ask(page, QUESTION)
    expect(page.locator(DONE)).to_be_attached()
    link = page.url
    ask(page, OTHER)
    expect(page).to_have_title(f"{OTHER} · REALM")
    page.go_back()
    expect(page).to_have_title(f"{QUESTION} · REALM")
    expect(page.get_by_label(FIELD)).to_have_value(QUESTION)
    page.go_back()
    expect(page.locator("#result")).to_be_hidden()
    page.goto("about:blank")
    page.goto(link)
    expect(page.get_by_role("region", name="Answer")).to_be_visible()


# ---- what the numbers say


def test_the_table_has_the_numbers_of_the_paper_and_what_would_be_without(page):
    explained(page, TABLE)
    rows = page.get_by_role("table").get_by_role("row")
    expect(rows.nth(0).get_by_role("columnheader")).to_have_text(
        ["Passage z", *(f"{name}{meaning}" for name, meaning in [
            ("p(z|x)", "chosen for the text"), ("p(y|z,x)", "the answer beside it"),
            ("p(z|x,y)", "its share of the answer"), ("r(z)", "how much it helped"),
            ("without z", "p(y|x) then"),
        ])]
    )  # fmt: skip
    numbers = [rows.nth(place).get_by_role("cell").all_inner_texts() for place in (1, 2, 3)]
    assert numbers == [
        ["0.500", "0.900", "0.947", "+0.447", "0.050"],  # 0.2 × 0.125 / 0.5
        ["0.300", "1.1 × 10⁻¹⁴", "6.9 × 10⁻¹⁵", "−0.300", "0.679"],  # (0.45 + 0.025) / 0.7
        ["0.200", "0.125", "0.053", "−0.147", "0.563"],  # 0.45 / 0.8
    ]
    expect(rows.nth(3).get_by_role("rowheader")).to_have_text("No passage")
    expect(page.locator("#verdict")).to_have_text("Kifik has p(y|x) = 0.475; without On a it would be 0.050.")
    expect(page.locator("#facts dd")).to_have_text(["0.010", "0.900", "0.475", "0.900"])


def test_an_answer_that_stands_nowhere_has_no_share(page):
    explained(page, inspected(("a", 1.0, 0.0, "No."), alone=None))
    expect(page.get_by_role("table").get_by_role("cell")).to_have_text(["1.000", "0", "–", "–", "–"])
    expect(page.locator("#verdict")).to_have_text("No passage that was read has the answer Kifik.")


def test_the_likeliest_rows_are_shown_first_and_the_empty_passage_always(page):
    many = [(f"p{number}", 0.1, 0.5, "text") for number in range(9)]
    explained(page, inspected(*many, (None, 0.1, 0.5, "")))
    shown = page.locator("tbody tr:visible")
    expect(shown).to_have_count(6)
    expect(shown.last).to_contain_text("No passage")
    page.get_by_role("button", name="Show all 10 rows").press("Enter")
    expect(shown).to_have_count(10)
    page.get_by_role("button", name="Show fewer rows").click()
    expect(shown).to_have_count(6)


FACTS = {"run": "r", "task": "qa", "step": 1, "search": "vectors", "rerank": "none",
         "passages": 1, "vector_size": 8, "ready": True}  # fmt: skip


@pytest.mark.parametrize(
    ("reader", "exact", "on", "said"),
    [
        ("questions", 0.876, "development questions", "this run answers 87.6% of its development questions right and "
         "finds the right passage in the top 5 for 50%"),
        ("blanks", None, "sentences", "never saw a question: check its answers. By its own measurement this run finds "
         "the right passage in the top 5 for 50% of its sentences."),
        ("questions", None, None, "This run has not measured how often it is right."),
    ],
)  # fmt: skip
def test_how_far_to_trust_an_answer_is_said(page, reader, exact, on, said):
    gives(page, "/model", FACTS | {"answers": True, "reader": reader})
    measured = on and {"exact_match": exact, "recall@5": 0.5, "on": on}
    gives(page, "/ask", answer(candidate(), measured=measured))
    page.reload()
    ask(page)
    expect(page.get_by_role("region", name="Answer")).to_contain_text(said)


def test_without_a_reader_the_passages_are_shown_alone(page):
    nothing = {"answer": None, "probability": None, "passage": None, "nbest": []}
    found = candidate(span=None, ranks={"vectors": 2, "bm25": 13})
    gives(page, "/ask", {"question": "q", "measured": None, "candidates": [found]} | nothing)
    ask(page)
    told = page.get_by_role("region", name="No answer")
    expect(told).to_contain_text("This run has no reader, so you see passages.")
    expect(page.locator("#passages li")).to_contain_text("found by vectors (2nd) and words (13th)")
    placed = candidate(span=None, ranks={"vectors": 2, "bm25": 13, "tokens": 1})
    gives(page, "/ask", {"question": "q", "measured": None, "candidates": [placed]} | nothing)
    ask(page)
    found_by = "found by vectors (2nd) and words (13th); placed 1st by token vectors"
    expect(page.locator("#passages li")).to_contain_text(found_by)
    expect(page.get_by_role("button", name="Why this answer?")).to_be_hidden()
    gives(page, "/ask", {"question": "q", "measured": None, "candidates": []} | nothing)
    ask(page)
    expect(told).to_contain_text("No passage shares a word with the question")


def test_a_service_that_only_searches_is_searched(page):
    gives(page, "/model", FACTS | {"answers": False, "reader": None})
    found = candidate(span=None, score=25.4291)
    del found["probability"]
    gives(page, "/search", {"question": "q", "index_step": 1, "candidates": [found]})
    page.reload()
    ask(page)
    expect(page.get_by_role("region", name="Nearest passages")).to_contain_text("score 25.429")


def test_a_model_that_is_not_ready_is_waited_for(page):
    page.clock.install()
    gives(page, "/ready", {"ready": False}, 503)
    page.reload()
    waits = page.get_by_text("The model is being made ready")
    expect(waits).to_be_visible()
    gives(page, "/ready", {"ready": True})
    page.clock.run_for(2000)
    expect(waits).to_be_hidden()


# ---- what can go wrong


def test_an_empty_question_is_not_sent(page):
    ask(page, "  ")
    expect(page.get_by_role("alert")).to_have_text("Type a question first.")
    expect(page.get_by_label(FIELD)).to_be_focused()
    expect(page.get_by_label(FIELD)).to_have_attribute("aria-invalid", "true")


def test_what_the_service_says_is_shown_until_the_next_question(page):
    ask(page, "who " * 40)
    expect(page.get_by_role("alert")).to_contain_text("this run reads at most 14")
    ask(page, "___ or ___")
    expect(page.get_by_role("alert")).to_contain_text("2 blanks")
    ask(page, QUESTION)
    expect(page.get_by_role("region", name="Answer")).to_be_visible()
    expect(page.get_by_role("alert")).to_be_empty()
    ask(page, "who " * 40)
    expect(page.get_by_role("region", name="Answer")).to_be_hidden()  # it is of another question


def test_what_may_pass_can_be_tried_again(page):
    for status, said in (
        (429, "Ask again in a moment."),
        (500, "Ask again; if it stays so, tell whoever runs the service."),
        (503, "Ask again in half a minute."),
        (504, "Ask again: the first request of a kind takes longest"),
    ):
        gives(page, "/ask", {"error": {"type": "busy", "message": "too many texts are waiting"}}, status)
        ask(page)
        expect(page.get_by_role("alert")).to_contain_text(f"Too many texts are waiting. {said}")
    gives(page, "/ask", answer(candidate()))
    page.get_by_role("button", name="Try again").press("Enter")
    expect(page.get_by_label(FIELD)).to_be_focused()
    expect(page.get_by_role("region", name="Answer")).to_contain_text("Kifik")
    expect(page.get_by_role("alert")).to_be_empty()


def test_a_service_that_is_gone_or_replies_something_else_is_told_of(page):
    page.route("**/ask", lambda route: route.abort("connectionrefused"))
    ask(page)
    expect(page.get_by_role("alert")).to_contain_text("The service cannot be reached.")
    page.unroute("**/ask")
    page.route("**/ask", lambda route: route.fulfill(status=502, body="<h1>Bad gateway</h1>"))
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_role("alert")).to_contain_text("cannot be read (status 502)")


def test_a_token_is_asked_for_and_kept_for_the_tab(browser, service):
    with served(service, token="sécret") as address, opened(browser, address) as page:
        ask(page, QUESTION)
        token = page.get_by_label("Token", exact=True)
        expect(page.get_by_role("alert")).to_have_text("This service asks for a token.")
        expect(token).to_be_focused()
        expect(token).to_have_attribute("type", "password")
        page.keyboard.type("other")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_have_text("This is not the token of the service.")
        page.keyboard.type("sécret")
        page.keyboard.press("Enter")
        expect(page.get_by_role("region", name="Answer")).to_be_visible()
        expect(token).to_be_hidden()
        assert "cret" not in page.url and page.evaluate("localStorage.length") == 0
        page.reload()
        expect(page.get_by_role("region", name="Answer")).to_be_visible()


def test_a_new_question_ends_the_one_before(page):
    waiting = []

    def reply(route) -> None:
        if route.request.post_data_json["question"] == "first":
            waiting.append(route)
        else:
            route.fulfill(json=answer(candidate("It is second.", (6, 12))))

    page.route("**/ask", reply)
    keeps = "to === './ask' && signals.push(how.signal)"
    page.evaluate(f"signals = []; send = fetch; fetch = (to, how) => {{ {keeps}; return send(to, how); }}; 0")
    ask(page, "first")
    expect(page.locator("#status")).to_have_text("Asking …")
    ask(page, "second")
    expect(page.locator("#found strong")).to_have_text("second")
    assert page.evaluate("signals.map((one) => one.aborted)") == [True, False]
    with contextlib.suppress(api.Error):  # nobody waits for it
        waiting[0].fulfill(json=answer(candidate("It is first.", (6, 11))))
    page.evaluate("fetch('/health')")
    expect(page.locator("#found strong")).to_have_text("second")
    expect(page.get_by_role("alert")).to_be_empty()


# ---- texts


def test_markup_in_what_comes_back_is_text(page):
    bad = "<script>alert(1)</script><img src=x onerror=alert(2)><b>Kifik</b>"
    one = candidate(bad, (0, len(bad)), title=bad, id=bad, ranks={bad: 1})
    explained(page, inspected((bad, 1.0, 0.5, bad), answer=bad), answer(one, measured={"exact_match": 1, "on": bad}))
    assert page.locator("#result").inner_text().count(bad) > 8
    assert page.locator("#result :is(script, img, b)").count() == 0
    gives(page, "/ask", {"error": {"type": "text", "message": bad}}, 400)
    ask(page, bad)
    expect(page.get_by_role("alert")).to_contain_text(bad)
    assert page.locator(":is(#fault, #answer) :is(script, img, b)").count() == 0


@pytest.mark.parametrize("before", ["😀 ", "𝒜 and 👨‍👩‍👧: ", "naïve e\u0301 ", "漢字𠮷は"])
def test_spans_count_characters_as_python_does(page, before):
    text = f"{before}Kifik 😀 is the end."
    span = (text.index("Kifik"), text.index(" is"))
    gives(page, "/ask", answer(candidate(text, span)))
    ask(page)
    expect(page.locator("blockquote mark")).to_have_text("Kifik 😀")
    expect(page.locator("blockquote p")).to_have_text(text)


@pytest.mark.parametrize("word", ["word ", "漢", "👩🏽‍🚀"])
def test_a_long_passage_is_cut_around_its_answer_until_all_is_asked_for(page, word):
    text = word * 300 + "Kifik" + word * 300
    start = text.index("Kifik")
    gives(page, "/ask", answer(candidate(text, (start, start + 5))))
    ask(page)
    quote = page.locator("blockquote")
    expect(quote.locator("mark")).to_have_text("Kifik")
    cut = quote.locator("p").inner_text()
    assert 300 < len(cut) < 450 and cut.startswith("… ") and cut.endswith(" …")
    parts = cut.strip("… ").split("Kifik")
    assert all(part.strip() and not part.strip().replace(word.strip(), "").strip() for part in parts)
    quote.get_by_role("button", name="Show all of Title").press("Enter")
    expect(quote.locator("p")).to_have_text(text.strip())
    quote.get_by_role("button", name="Show less of Title").press("Enter")
    expect(quote.locator("p")).to_have_text(cut)


def test_answers_are_marked_in_the_table_as_whole_words(page):
    text = "Kifikland is not KIFIK, nor is (kifik)."
    explained(page, inspected(("a", 1.0, 0.5, text)))
    expect(page.locator("tbody mark")).to_have_text(["KIFIK", "kifik"])
    explained(page, inspected(("a", 1.0, 0.5, "東京は首都です。C++ (a"), answer="首都"))
    expect(page.locator("tbody mark")).to_have_text("首都")
    explained(page, inspected(("a", 1.0, 0.5, "C++ (a"), answer="c++ (a"))
    expect(page.locator("tbody mark")).to_have_text("C++ (a")


def test_texts_are_read_in_their_own_direction(page):
    text = "تقع المدينة في الشمال."
    gives(page, "/ask", answer(candidate(text, (4, 11), title="مدينة")))
    ask(page)
    for place in ("blockquote p", "#found strong", "#passages h3", "#passages .text"):
        expect(page.locator(place).first).to_have_css("direction", "rtl")
    expect(page.locator("#passages li > .note").first).to_have_css("direction", "ltr")


# ---- for everyone


def test_controls_and_results_have_names(page):
    expect(page.get_by_role("search")).to_match_aria_snapshot("""
        - search:
          - text: A question, or a sentence with a blank
          - textbox "A question, or a sentence with a blank"
          - button "Ask"
    """)
    explained(page, TABLE)
    expect(page.locator("#result")).to_match_aria_snapshot("""
        - region "Answer":
          - heading "Answer" [level=2]
          - button "Why this answer?" [expanded]
        - region "Why":
          - heading "Why" [level=2]
          - combobox "Explain another answer"
          - button "Explain"
          - table "What each passage z does to the answer y of the text x":
            - rowgroup:
              - row:
                - columnheader /Passage z/
                - columnheader /p\\(z\\|x\\)/
            - rowgroup:
              - row:
                - rowheader /On a/
                - cell "0.500"
              - row:
                - rowheader /On b/
              - row:
                - rowheader "No passage"
        - region "Passages that were read":
          - list:
            - listitem:
              - heading "Title" [level=3]
    """)


def test_everything_is_done_by_keyboard_in_order_and_seen(page):
    gives(page, "/ask", answer(candidate("long " * 300 + "Kifik", (1500, 1505))))
    gives(page, "/inspect", TABLE)
    expect(page.get_by_label(FIELD)).to_be_focused()
    page.keyboard.type("where is it?")
    page.keyboard.press("Shift+Enter")
    page.keyboard.press("Enter")
    expect(page.locator(DONE)).to_be_attached()
    names = ["Ask", "Show all", "Why this answer?"]
    for name in names:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == name
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    expect(page.get_by_role("table")).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_label("Explain another answer")).to_be_focused()
    with page.expect_request("**/inspect") as asked:
        page.keyboard.type("Granax")
        page.keyboard.press("Enter")
    assert asked.value.post_data_json == {"text": "where is it?", "answer": "Granax"}


def test_enter_that_ends_what_an_input_method_writes_does_not_ask(page):
    page.get_by_label(FIELD).fill("東京")
    enter = {"key": "Enter", "bubbles": True, "cancelable": True}
    page.get_by_label(FIELD).dispatch_event("keydown", enter | {"isComposing": True})
    assert "#" not in page.url
    page.get_by_label(FIELD).dispatch_event("keydown", enter)
    assert "#q=" in page.url


@pytest.mark.parametrize("width", [320, 400])
def test_a_narrow_screen_does_not_scroll_sideways(page, width):
    page.set_viewport_size({"width": width, "height": 800})
    wide = "Donaudampfschifffahrtsgesellschaft" * 4
    one = candidate(wide, (0, len(wide)), title=wide, id=wide, ranks={"vectors": 100, "bm25": 100}, probability=1e-30)
    other = {"answer": wide, "probability": 1.1e-14, "passage": one}
    reply = answer(one, nbest=[other, other])
    explained(page, inspected((wide, 1.1e-14, 1.1e-14, wide), (None, 1.0, 1.1e-14, ""), answer=wide), reply)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    rights = (
        "[...document.querySelectorAll('#result :not(thead, thead *)')].map(one => one.getBoundingClientRect().right)"
    )
    assert max(page.evaluate(rights)) <= width
