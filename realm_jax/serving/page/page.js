// The page of `realm serve`: asks its paths, and shows what they give. What the replies hold is said in `inference/`.
// Texts of passages become text nodes and nothing else; spans count code points, as Python does.

const TOKEN = "realm-token"; // in sessionStorage
const LONG = 420; // code points of a passage that are shown at first
const SHORT = 150; // of a passage in the table
const FEW = 5; // passages of the table and other answers that are shown at first
const POLL = 2000; // milliseconds between two checks if the model is ready
const BLANK = /_{2,}|\[[^[\]]+\]/; // as the service finds it
const SEARCHES = { vectors: "vectors", bm25: "words", hybrid: "vectors and words" };
const RERANKERS = { tokens: "token vectors", "cross-encoder": "cross-encoder", none: "no reranker" };
const ADVICE = {
  429: "Ask again in a moment.",
  500: "Ask again; if it stays so, tell whoever runs the service.",
  503: "Ask again in half a minute.",
  504: "Ask again: the first request of a kind takes longest, and what it prepares is kept.",
};

const byId = (id) => document.getElementById(id);
const field = byId("text");
let facts = null; // of the model, once they are known
let running = null; // AbortController of the request under way
let shown = null; // {text, blank}: what the result on the page answers
let again = null; // what to do once there is a token

// --- numbers and words -----------------------------------------------------------------------------------------------

const count = (number) => number.toLocaleString("en");
const share = (value) => value.toLocaleString("en", { style: "percent", maximumFractionDigits: 1 });

/** 0.129, or 1.1 × 10⁻¹⁴ and > 0.999 where three decimals would say 0 or 1; – where there is none. */
function probability(value) {
  if (value === null) return "–";
  if (value === 0) return "0";
  if (value >= 0.001) return value >= 0.9995 && value < 1 ? "> 0.999" : value.toFixed(3);
  const [mantissa, exponent] = value.toExponential(1).split("e");
  return `${mantissa} × 10${[...exponent].map((digit) => (digit === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit])).join("")}`;
}

/** A difference of probabilities, with its sign. */
function signed(value) {
  if (value === null || value === 0) return probability(value);
  return (value < 0 ? "−" : "+") + probability(Math.abs(value));
}

function ordinal(place) {
  const endings = { one: "st", two: "nd", few: "rd", other: "th" };
  return `${place}${endings[new Intl.PluralRules("en", { type: "ordinal" }).select(place)]}`;
}

const passagesOf = (number) => `${count(number)} ${number === 1 ? "passage" : "passages"}`;
const titleOf = (place) => place.title || "untitled";
const whereOf = (place) => `${place.id}, part ${place.part}`;
const nameOf = (passage) => (passage.id === null ? "no passage" : `“${titleOf(passage)}” (${whereOf(passage)})`);

/** p(y|x) if a passage were not there: the priors of the others, made to add up to 1. null where there is no other. */
function without(passages, left) {
  const others = passages.filter((one) => one !== left);
  const prior = others.reduce((sum, one) => sum + one.prior, 0);
  return prior > 0 ? others.reduce((sum, one) => sum + one.prior * one.likelihood, 0) / prior : null;
}

// --- elements --------------------------------------------------------------------------------------------------------

/** An element; children are elements or text. */
function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function bar(value) {
  const fill = make("span", { class: "fill" });
  fill.style.width = `${100 * Math.min(1, Math.max(0, value))}%`;
  return make("span", { class: "track", "aria-hidden": "true" }, fill);
}

/** Text with marks: [start, end] in code points, in order. */
function marked(points, marks, from = 0, to = points.length) {
  const made = document.createDocumentFragment();
  const text = (start, end) => points.slice(Math.max(start, from), Math.min(end, to)).join("");
  let done = from;
  for (const [start, end] of marks) {
    if (end <= Math.max(start, done) || start >= to) continue;
    made.append(text(done, start), make("mark", {}, text(Math.max(start, done), end)));
    done = end;
  }
  made.append(text(done, to));
  return made;
}

/** Where to cut a text so that about `room` code points around its first mark are left, between words where it has
 * spaces, and never before a combining mark. */
function cut(points, marks, room) {
  const [start, end] = marks[0] ?? [0, 0];
  const around = Math.max(0, room - (end - start));
  let first = Math.max(0, Math.min(start - Math.floor(around / 3), points.length - room));
  let last = Math.max(end, Math.min(points.length, first + room));
  const joined = (place) =>
    /^[\p{M}\u200d\u{1f3fb}-\u{1f3ff}]/u.test(points[place] ?? "") || points[place - 1] === "\u200d";
  const space = (place) => /\s/.test(points[place] ?? " ");
  const near = (place, step, limit) => {
    for (let moved = place; Math.abs(moved - place) < 20 && moved !== limit; moved += step) {
      if (space(moved)) return moved;
    }
    let kept = place;
    while (kept !== limit && joined(kept)) kept += step;
    return kept;
  };
  if (first > 0) first = near(first, 1, start);
  if (last < points.length) last = near(last, -1, end);
  return [first, last];
}

/** A passage's text, cut around its first mark where it is long, with a button that shows all. */
function passageText(text, marks, name, room) {
  const points = Array.from(text);
  const paragraph = make("p", { class: "text", dir: "auto" });
  if (points.length <= room * 1.3) {
    paragraph.append(marked(points, marks));
    return [paragraph];
  }
  const button = make("button", { type: "button", class: "link" });
  const show = (all) => {
    const [from, to] = all ? [0, points.length] : cut(points, marks, room);
    paragraph.replaceChildren(from > 0 ? "… " : "", marked(points, marks, from, to), to < points.length ? " …" : "");
    button.textContent = all ? "Show less" : "Show all";
    button.setAttribute("aria-label", `${button.textContent} of ${name}`);
    button.setAttribute("aria-expanded", String(all));
  };
  button.addEventListener("click", () => show(button.getAttribute("aria-expanded") === "false"));
  show(false);
  return [paragraph, button];
}

/** Put items into a list: the first few of them, those to keep, and the others once a button is pressed. */
function fill(list, button, items, what, keep = () => false) {
  const rest = items.filter((item, place) => place >= FEW && !keep(item));
  const show = (all) => {
    for (const item of rest) item.hidden = !all;
    button.textContent = all ? `Show fewer ${what}` : `Show all ${items.length} ${what}`;
    button.setAttribute("aria-expanded", String(all));
  };
  list.replaceChildren(...items);
  button.hidden = !rest.length;
  button.onclick = () => show(button.getAttribute("aria-expanded") === "false");
  show(false);
}

/** Where an answer stands in a text as whole words, whatever its case: [[start, end], …] in code points. */
function occurrences(text, answer) {
  const word = answer
    .trim()
    .replace(/[\^$\\.*+?()[\]{}|/]/g, "\\$&")
    .replace(/\s+/g, "\\s+");
  if (!word) return [];
  const letter = "[\\p{Lu}\\p{Ll}\\p{Lt}\\p{M}\\p{N}]"; // not \p{Lo}: many scripts put no space between words
  const found = text.matchAll(new RegExp(`(?<!${letter})${word}(?!${letter})`, "giu"));
  const place = (index) => Array.from(text.slice(0, index)).length;
  return Array.from(found, (one) => [place(one.index), place(one.index + one[0].length)]);
}

const titleAndPlace = (place, tag) => [
  make(tag, { class: "title", dir: "auto" }, titleOf(place)),
  make("p", { class: "note where" }, make("bdi", {}, whereOf(place))),
];

function fillFacts(list, pairs) {
  list.replaceChildren(...pairs.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
}

// --- requests --------------------------------------------------------------------------------------------------------

/** A reply that is none, or says what is wrong. status: 0 where none came. */
class Fault extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** What the service replies. Throws Fault, and AbortError once the signal says so. */
async function request(path, body, signal) {
  const headers = {};
  const token = sessionStorage.getItem(TOKEN);
  // A header takes bytes; the service compares with the token's UTF-8.
  if (token) headers.authorization = `Bearer ${String.fromCharCode(...new TextEncoder().encode(token))}`;
  if (body) headers["content-type"] = "application/json";
  let reply, found;
  try {
    reply = await fetch(`.${path}`, {
      method: body ? "POST" : "GET",
      headers,
      body: body && JSON.stringify(body),
      signal,
    });
    found = await reply.json();
  } catch (error) {
    signal?.throwIfAborted();
    if (reply) throw new Fault(reply.status, `the reply of the service cannot be read (status ${reply.status})`);
    throw new Fault(0, "the service cannot be reached. See whether it runs, then ask again.");
  }
  signal?.throwIfAborted();
  if (reply.ok) return found;
  throw new Fault(reply.status, found?.error?.message ?? `the service replied with status ${reply.status}`);
}

/** Do one thing that needs the service; what was under way is given up. failed: called if it cannot be done. */
async function run(busy, work, failed = () => {}) {
  running?.abort();
  const mine = new AbortController();
  running = mine;
  byId("fault").replaceChildren();
  byId("access").hidden = true;
  say(busy, true);
  try {
    say(await work(mine.signal), false);
  } catch (error) {
    if (mine.signal.aborted) return;
    say("", false);
    failed();
    complain(error instanceof Fault ? error : new Fault(500, "this page cannot show the reply"), () =>
      run(busy, work, failed),
    );
    if (!(error instanceof Fault)) throw error;
  }
}

/** Tell how it goes: in sight while it lasts, then to those who listen. */
function say(text, busy) {
  byId("status").textContent = text;
  byId("status").className = busy ? "busy" : "unseen";
  byId("result").setAttribute("aria-busy", String(busy));
}

function complain(fault, retry) {
  const refused = sessionStorage.getItem(TOKEN)
    ? "this is not the token of the service"
    : "this service asks for a token";
  const message = fault.status === 401 ? refused : fault.message;
  const sentence = message.charAt(0).toUpperCase() + message.slice(1);
  const ended = /[.!?]$/.test(sentence) ? sentence : `${sentence}.`;
  byId("fault").replaceChildren(make("p", {}, `${ended} ${ADVICE[fault.status] ?? ""}`.trim()));
  if (fault.status === 401) {
    again = retry;
    byId("access").hidden = false;
    byId("token").value = "";
    byId("token").focus();
  } else if (fault.status === 0 || fault.status === 429 || fault.status >= 500) {
    const button = make("button", { type: "button", class: "quiet" }, "Try again");
    button.addEventListener("click", () => {
      field.focus({ preventScroll: true }); // the button goes
      retry();
    });
    byId("fault").append(button);
  }
  byId("fault").scrollIntoView({ block: "nearest" });
}

// --- the model -------------------------------------------------------------------------------------------------------

async function learnFacts(signal) {
  facts = await request("/model", null, signal);
  const about = `${passagesOf(facts.passages)} of the run `;
  byId("about").replaceChildren(
    about,
    make("bdi", {}, facts.run),
    facts.answers ? "" : ", which are searched without answering",
  );
  fillFacts(byId("model"), [
    ["Run", make("bdi", {}, facts.run)],
    ["Task", `${facts.task}, step ${count(facts.step)}`],
    ["Passages", count(facts.passages)],
    ["Found by", SEARCHES[facts.search] ?? facts.search],
    ["Reranked by", RERANKERS[facts.rerank] ?? facts.rerank],
    ["Numbers of a vector", count(facts.vector_size)],
    ["State", facts.ready ? "ready" : "being made ready"],
  ]);
}

/** Look until the model is ready; then its facts say so too. */
async function awaitReady() {
  try {
    await request("/ready");
    byId("preparing").textContent = "";
  } catch (fault) {
    byId("preparing").textContent =
      fault.status === 503
        ? "The model is being made ready; until then answers take longer."
        : "The service cannot be reached.";
    setTimeout(awaitReady, POLL);
  }
  if (facts === null || !facts.ready) await learnFacts().catch(() => {}); // who asks is told what is wrong
}

// --- an answer -------------------------------------------------------------------------------------------------------

function barItem(answer, value, note) {
  const name = make("span", { class: "label", dir: "auto" }, answer || "(no answer)");
  const said = note ? [make("span", { class: "note", dir: "auto" }, note)] : [];
  return make("li", { class: "bar" }, name, bar(value), make("span", { class: "value" }, probability(value)), ...said);
}

function showOthers(items) {
  byId("others").hidden = !items.length;
  fill(byId("others").querySelector("ol"), byId("more-others"), items, "answers");
}

/** How far to trust an answer. */
function trust(measured) {
  const said = [];
  if (facts.reader === "blanks") {
    said.push("The reader learned from blanks in the documents and never saw a question: check its answers.");
  }
  const parts = [];
  const on = measured?.on ? `its ${measured.on}` : "the questions that it was measured on";
  const answered = measured?.exact_match ?? null;
  const found = measured?.["recall@5"] ?? null;
  if (answered !== null) parts.push(`answers ${share(answered)} of ${on} right`);
  if (found !== null) {
    parts.push(`finds the right passage in the top 5 for ${share(found)}${parts.length ? "" : ` of ${on}`}`);
  }
  if (parts.length) said.push(`By its own measurement this run ${parts.join(" and ")}.`);
  else if (!said.length) said.push("This run has not measured how often it is right.");
  return said.join(" ");
}

function answerParts(reply) {
  if (!reply.candidates.length) {
    return [make("p", {}, "No passage shares a word with the question; ask with other words.")];
  }
  if (reply.passage === null && !reply.nbest.length) {
    return [make("p", {}, "This run has no reader, so you see passages. For answers, start the service with --reader.")];
  }
  const { answer, probability: chance, passage } = reply;
  const heading = make(
    "p",
    { class: "big" },
    make("strong", { dir: "auto" }, answer || "No answer"),
    " ",
    make("span", { class: "value" }, `probability ${probability(chance)}`),
  );
  if (passage === null) return [heading];
  const quote = make("blockquote", {}, ...passageText(passage.text, [passage.span], titleOf(passage), LONG));
  const from = ["from ", make("cite", { dir: "auto" }, titleOf(passage)), ` (${whereOf(passage)})`];
  return [heading, quote, make("p", { class: "note where" }, ...from)];
}

function showAnswer(text, reply) {
  const answered = reply.nbest.length > 0;
  byId("answer-head").textContent = answered ? "Answer" : "No answer";
  byId("found").replaceChildren(...answerParts(reply));
  if (reply.candidates.length) byId("found").append(make("p", { class: "note" }, trust(reply.measured)));
  showOthers(
    reply.nbest.slice(1).map((one) => barItem(one.answer, one.probability, one.passage && titleOf(one.passage))),
  );
  byId("known").replaceChildren(
    ...[...new Set(reply.nbest.map((one) => one.answer))].map((value) => make("option", { value })),
  );
  showPassages(
    reply.candidates,
    answered ? "Passages that were read" : "Passages",
    answered
      ? "p(z|x) is the weight of a passage z in the answer; its own best answer is marked."
      : "p(z|x) is the weight that the search gives a passage z.",
  );
  reveal({ text, blank: false }, { why: answered, explanation: false });
  const said = answered
    ? `Answer: ${reply.answer || "none"}, probability ${probability(reply.probability)}`
    : "No answer";
  return `${said}; ${passagesOf(reply.candidates.length)}.`;
}

function showSearch(text, reply) {
  byId("answer-head").textContent = "No answer";
  byId("found").replaceChildren(
    make("p", {}, "This service searches and does not answer: these are the nearest passages."),
  );
  showOthers([]);
  showPassages(reply.candidates, "Nearest passages", "");
  reveal({ text, blank: false }, { why: false, explanation: false });
  return `${passagesOf(reply.candidates.length)} found.`;
}

function showPassages(candidates, heading, note) {
  byId("passages-head").textContent = heading;
  byId("passages-note").textContent = note;
  byId("passages").hidden = !candidates.length;
  byId("passages")
    .querySelector("ol")
    .replaceChildren(...candidates.map(passageItem));
}

function passageItem(one) {
  const isReranker = ([stage]) => Object.hasOwn(RERANKERS, stage);
  const ranks = Object.entries(one.ranks);
  const places = ranks
    .filter((entry) => !isReranker(entry))
    .map(([search, place]) => `${SEARCHES[search] ?? search} (${ordinal(place)})`);
  const number =
    "probability" in one
      ? make(
          "p",
          { class: "bar" },
          make("span", { class: "label" }, "p(z|x)"),
          bar(one.probability),
          make("span", { class: "value" }, probability(one.probability)),
        )
      : make("p", { class: "note" }, `score ${one.score.toFixed(3)}`);
  const found = make("p", { class: "note" }, places.length ? `found by ${places.join(" and ")}` : "");
  for (const [stage, place] of ranks.filter(isReranker)) {
    found.append(`; placed ${ordinal(place)} by ${RERANKERS[stage]}`);
  }
  if (one.answer) found.append("; best answer: ", make("bdi", {}, one.answer));
  return make(
    "li",
    { class: "card" },
    ...titleAndPlace(one, "h3"),
    number,
    found,
    ...passageText(one.text, one.span ? [one.span] : [], titleOf(one), LONG),
  );
}

/** Show what has been filled in. */
function reveal(now, { why, explanation }) {
  shown = now;
  byId("result").hidden = false;
  byId("why").hidden = !why;
  setExplanation(explanation);
  byId("explain-answer").hidden = now.blank;
  byId("explain-blank").hidden = !now.blank || !BLANK.exec(now.text)[0].startsWith("_");
  document.title = `${now.text} · REALM`;
}

function setExplanation(open) {
  byId("explanation").hidden = !open;
  byId("why").setAttribute("aria-expanded", String(open));
}

// --- why -------------------------------------------------------------------------------------------------------------

const COLUMNS = [
  ["p(z|x)", "chosen for the text", (one) => probability(one.prior), (one) => one.prior],
  ["p(y|z,x)", "the answer beside it", (one) => probability(one.likelihood)],
  ["p(z|x,y)", "its share of the answer", (one) => probability(one.posterior), (one) => one.posterior],
  ["r(z)", "how much it helped", (one) => signed(one.gain)],
  ["without z", "p(y|x) then", (one, all) => probability(without(all, one))],
];

function showBlank(text, record) {
  const [blank] = BLANK.exec(text);
  const [before, after] = [text.slice(0, text.indexOf(blank)), text.slice(text.indexOf(blank) + blank.length)];
  byId("answer-head").textContent = "Filled in";
  const sentence = make("p", { class: "sentence", dir: "auto" }, before, make("mark", {}, record.answer), after);
  byId("found").replaceChildren(
    sentence,
    make("p", { class: "value" }, `probability ${probability(record.probability)}`),
  );
  showOthers(record.others.map((one) => barItem(one.answer, one.probability)));
  showPassages([], "", "");
  showExplanation(record);
  reveal({ text, blank: true }, { why: false, explanation: true });
  return `Filled in: ${record.answer}, probability ${probability(record.probability)}.`;
}

function showExplanation(record) {
  const { passages } = record;
  const nowhere = passages.every((one) => one.posterior === null);
  const best = passages.reduce((most, one) => (one.likelihood > most.likelihood ? one : most), passages[0]);
  byId("verdict").replaceChildren(...verdict(record, nowhere));
  const said = [];
  if (record.alone !== null) said.push(["With no passage, p(y|x,∅)", probability(record.alone)]);
  if (!nowhere) said.push([`At best, p(y|z,x) beside ${nameOf(best)}`, probability(best.likelihood)]);
  said.push(["With all of these, p(y|x)", probability(record.probability)]);
  said.push(["Share of the whole corpus's p(z|x) that these hold", probability(record.held)]);
  fillFacts(byId("facts"), said);
  const head = (name, meaning) =>
    make("th", { scope: "col", role: "columnheader" }, name, make("span", { class: "note" }, meaning));
  byId("influence").tHead.replaceChildren(
    make("tr", { role: "row" }, head("Passage z", ""), ...COLUMNS.map(([name, meaning]) => head(name, meaning))),
  );
  const rows = new Map(passages.map((one) => [influenceRow(one, passages, record.answer), one]));
  fill(byId("influence").tBodies[0], byId("more-rows"), [...rows.keys()], "rows", (row) => rows.get(row).id === null);
  byId("reading").textContent =
    "r(z) = p(z|x,y) − p(z|x): above 0, the passage helped. Without a passage, its weight goes to the others that " +
    `were read. Computed with the parameters of task ${record.task} at step ${count(record.step)}.`;
}

/** The sentence above the numbers: the answer, and the passage that it would lose most without. */
function verdict(record, nowhere) {
  const answer = make("strong", { dir: "auto" }, record.answer || "(no answer)");
  if (nowhere) return ["No passage that was read has the answer ", answer, "."];
  const said = [answer, ` has p(y|x) = ${probability(record.probability)}`];
  const looked = record.passages.map((one) => [one, without(record.passages, one)]);
  const [most, left] = looked.reduce((least, one) => ((one[1] ?? Infinity) < (least[1] ?? Infinity) ? one : least));
  if (left === null || left >= record.probability) return [...said, "; no passage raises it."];
  const name = most.id === null ? "the guess without a passage" : titleOf(most);
  return [...said, "; without ", make("strong", { dir: "auto" }, name), ` it would be ${probability(left)}.`];
}

function influenceRow(one, all, answer) {
  const head = make("th", { scope: "row", role: "rowheader" });
  if (one.id === null) {
    head.append(make("p", { class: "title" }, "No passage"));
  } else {
    const text = passageText(one.text, occurrences(one.text, answer), titleOf(one), SHORT);
    head.append(...titleAndPlace(one, "p"), ...text);
  }
  const cells = COLUMNS.map(([name, , number, size]) => {
    const cell = make("td", { role: "cell", "data-name": name }, make("span", { class: "value" }, number(one, all)));
    if (size && size(one) !== null) cell.append(bar(size(one)));
    if (name === "r(z)" && one.gain !== null) cell.classList.toggle("gain", one.gain > 0);
    return cell;
  });
  return make("tr", { role: "row" }, head, ...cells);
}

function explain(options) {
  const { text, blank } = shown;
  return run("Explaining …", async (signal) => {
    const record = await request("/inspect", { text, ...options }, signal);
    if (blank) return showBlank(text, record);
    showExplanation(record);
    setExplanation(true);
    return `Explained: ${record.answer}, probability ${probability(record.probability)}.`;
  });
}

// --- what people do --------------------------------------------------------------------------------------------------

function ask(text) {
  return run(
    "Asking …",
    async (signal) => {
      if (facts === null) await learnFacts(signal);
      let said;
      if (BLANK.test(text)) said = showBlank(text, await request("/inspect", { text }, signal));
      else if (facts.answers) said = showAnswer(text, await request("/ask", { question: text }, signal));
      else said = showSearch(text, await request("/search", { question: text }, signal));
      byId("pieces").value = 1;
      learnFacts().catch(() => {}); // a newer model may have been taken up; the next request says what is wrong
      return said;
    },
    unshow,
  );
}

/** No result is better than that of another question. */
function unshow() {
  byId("result").hidden = true;
  document.title = "Ask · REALM";
}

/** The question of the address; "" where there is none. */
const fromAddress = () => new URLSearchParams(location.hash.slice(1)).get("q") ?? "";

/** Ask what the address says, or show the page as it was at first. */
function follow() {
  const text = fromAddress();
  field.value = text;
  field.setAttribute("aria-invalid", "false");
  if (text.trim()) return ask(text);
  running?.abort();
  say("", false);
  byId("fault").replaceChildren();
  unshow();
}

function submitQuestion() {
  const text = field.value.trim();
  if (!text) {
    field.setAttribute("aria-invalid", "true");
    complain(new Fault(400, "type a question first."));
    field.focus();
    return;
  }
  const address = `#${new URLSearchParams({ q: text })}`;
  if (address === location.hash) ask(text);
  else location.hash = address; // `follow` asks
}

function onSubmit(id, handler) {
  byId(id).addEventListener("submit", (event) => {
    event.preventDefault();
    handler();
  });
}

onSubmit("ask", submitQuestion);
field.addEventListener("keydown", (event) => {
  // Enter also ends what an input method writes; Safari says so by the code 229.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
  event.preventDefault();
  byId("ask").requestSubmit();
});
onSubmit("access", () => {
  const token = byId("token").value.trim();
  if (!token) return byId("token").focus();
  sessionStorage.setItem(TOKEN, token);
  field.focus();
  return again();
});
onSubmit("explain", () => {
  if (shown.blank) return explain({ pieces: byId("pieces").valueAsNumber || 1 });
  const answer = byId("other").value.trim();
  return explain(answer ? { answer } : {});
});
byId("why").addEventListener("click", () => {
  if (!byId("explanation").hidden) return setExplanation(false);
  byId("other").value = "";
  return explain({});
});
addEventListener("hashchange", follow);

follow();
awaitReady();
