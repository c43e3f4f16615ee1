// The page as a whole: the conversation, the question, and the updates of all panels.

import { Alive } from "./alive.js";
import { AnswerView } from "./answer.js";
import { Decisions } from "./decisions.js";
import { DepthMap } from "./depth.js";
import { Attached, onDrop } from "./document.js";
import { Figures } from "./figures.js";
import { Race, pointless } from "./race.js";
import { reproduceNode } from "./reproduce.js";
import { ServerError, hasKey, json, setKey } from "./server.js";
import { Settings } from "./settings.js";
import { streamAnswer } from "./stream.js";
import { startTheme } from "./theme.js";
import { Timeline } from "./timeline.js";
import { TreeView } from "./tree.js";
import { element, plural, seconds } from "./dom.js";

const at = (id) => document.getElementById(id);

const panels = {
  figures: new Figures(at("figures")),
  timeline: new Timeline(at("timeline")),
  depth: new DepthMap(at("depth")),
  decisions: new Decisions(at("decisions")),
  tree: new TreeView(at("tree")),
};
const settings = new Settings(at);
const alive = new Alive(at("gone"), () => (loaded = load()));
const attached = new Attached(at("document"), at("remove"), problem);
let messages = []; // the conversation so far, as it is sent
let running = null; // the AbortController of the open request
let loaded = null; // resolves when /forerun/about was read

// -- requests ---------------------------------------------------------------------------------------------------------

/** The conversation with the new question; a document comes before it, so that later questions share its prefix. */
function withQuestion() {
  const question = at("question").value.trim();
  const content = attached.text === null ? question : `${attached.text}\n\n${question}`;
  return [question, [...messages, { role: "user", content }]];
}

async function askQuestion() {
  const [question, asked] = withQuestion();
  if (running || !ready(question)) return;
  const turn = element("li", "turn");
  turn.append(...questionNodes(question));
  const view = new AnswerView(update);
  for (const [name, value] of [["role", "article"], ["aria-label", "Answer"], ["aria-live", "polite"], ["aria-busy", "true"]]) {
    view.node.setAttribute(name, value); // screen readers read it when it is complete
  }
  turn.append(view.node);
  at("turns").append(turn);
  reveal(turn);
  at("question").value = "";
  const line = element("p", "quiet line");
  turn.append(line);
  const ended = await runExclusive(async (signal) => {
    panels.figures.waiting();
    const body = settings.body(asked);
    turn.append(reproduceNode(body));
    const reason = await streamAnswer(body, view.listener, signal);
    return `Answer complete: ${plural(view.live.tokens, "token")}, first token after ${seconds(view.live.shown)}`
      + `${reason === "length" ? "; it reached the longest answer allowed" : ""}.`;
  });
  if (!turn.isConnected) return; // a new conversation was started meanwhile
  view.abandon();
  view.node.setAttribute("aria-busy", "false");
  view.finish();
  panels.figures.rest(view);
  line.textContent = view.line;
  reveal(line);
  if (!ended && !view.text) {
    at("question").value = at("question").value || question; // it failed: the question can be sent again
    if (!view.node.textContent) turn.remove();
    return;
  }
  messages = [...asked, { role: "assistant", content: view.text }];
  attached.clear();
  await inspect(asked, view);
}

async function race() {
  const [question, asked] = withQuestion();
  if (running || !ready(question)) return;
  const body = settings.body(asked);
  if (pointless(body.forerun)) {
    problem("Both sides would be the same: choose another prefill mode or a drafter.");
    return;
  }
  const made = new Race(questionNodes(question), { prefill: body.forerun.prefill, speculation: body.forerun.speculation });
  at("turns").append(made.node);
  reveal(made.node);
  const ended = await runExclusive((signal) =>
    made.run(body, signal, update));
  reveal(made.node.lastChild);
  if (ended) await inspect(asked, made.winner);
}

/** Mark a panel whose content is about an earlier answer. */
function stale(name, is) {
  document.querySelector(`#${name}-h .before`).hidden = !is || !panels[name].filled;
}

/** Update the panels with a streaming answer. */
function update(view) {
  if (!view.node.isConnected) return; // of an earlier conversation
  panels.figures.live(view);
  panels.timeline.live(view);
  if (view.steps.length) stale("timeline", false);
  follow();
  if (!running) return; // text that is struck when an answer is stopped
  setStatus(view.live.first === null ? "Provisional text, while the exact prompt is computed…" : "Answering…");
}

/** Run one request: one at a time, can be stopped, reports its end. True when it succeeded. */
async function runExclusive(work) {
  running = new AbortController();
  problem("");
  at("welcome").hidden = true;
  busy(true);
  for (const name of ["timeline", "depth"]) stale(name, true);
  setStatus("Waiting for the first token…");
  try {
    await loaded; // a question may be sent before the model's name is known
    setStatus(await work(running.signal));
    return true;
  } catch (error) {
    if (error.name === "AbortError") setStatus("Stopped.");
    else failed(error);
    return false;
  } finally {
    running = null;
    busy(false);
  }
}

/** Fill the panels once an answer is complete. */
async function inspect(asked, view) {
  const figures = view.statistics;
  panels.figures.final(view);
  if (!figures) {
    panels.timeline.stopped();
  } else {
    panels.timeline.final(figures);
    panels.decisions.final(figures);
    try {
      const { pieces } = await json("/forerun/tokens", { messages: asked });
      if (!view.node.isConnected) return;
      panels.depth.draw(figures, pieces);
      for (const name of ["timeline", "depth"]) stale(name, false);
    } catch (error) {
      failed(error);
    }
  }
  await showTree();
}

async function showTree() {
  try {
    await panels.tree.refresh(messages);
  } catch (error) {
    failed(error);
  }
}

/** Scroll with the streaming answer, unless the user has scrolled up. */
function follow() {
  const box = at("scroll");
  if (box.scrollHeight - box.scrollTop - box.clientHeight < 120) box.scrollTop = box.scrollHeight;
}

function reveal(node) {
  node.scrollIntoView({ block: "nearest" });
}

// -- text -------------------------------------------------------------------------------------------------------------

function ready(question) {
  if (question) return true;
  problem(attached.text === null ? "There is no question yet." : "The document is attached; now ask something about it.");
  at("question").focus();
  return false;
}

function questionNodes(question) {
  const nodes = [element("p", "asked", question)];
  if (attached.text !== null) nodes.unshift(element("p", "quiet with", attached.line));
  return nodes;
}

function setStatus(text) {
  at("status").textContent = text;
}

function problem(text) {
  at("problem").textContent = text;
}

function failed(error) {
  setStatus("");
  if (error instanceof ServerError && error.status === 401) {
    at("key-form").hidden = false;
    at("key").focus();
    problem(hasKey() ? error.message : "");
    return;
  }
  if (error instanceof ServerError && !error.status) alive.check(); // nothing came, or the connection broke
  problem(error instanceof ServerError ? error.message : `Something on this page failed: ${error.message}`);
  if (!(error instanceof ServerError)) console.error(error);
}

function busy(is) {
  at("stop").disabled = !is;
  at("ask").disabled = at("race").disabled = is;
  if (!is && document.activeElement === document.body) at("question").focus(); // the button that had it is disabled
}

// -- start ------------------------------------------------------------------------------------------------------------

async function load() {
  try {
    const about = await json("/forerun/about");
    at("key-form").hidden = true;
    const facts = [about.model, `${about.weights} weights`, `on ${about.device}`, `${about.context.toLocaleString("en")} tokens of context`];
    at("about").textContent = facts.join(" · ");
    document.title = `Forerun · ${about.model}`;
    settings.offer(about);
    attached.limit(about.max_body_bytes, about.max_chars, about.context);
    await showTree();
  } catch (error) {
    at("about").textContent = "";
    failed(error);
  }
}

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  askQuestion();
});
at("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    askQuestion();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
});
at("race").addEventListener("click", race);
at("stop").addEventListener("click", () => running && running.abort());
at("refresh").addEventListener("click", showTree);
at("new").addEventListener("click", () => {
  if (running) running.abort();
  messages = [];
  at("turns").replaceChildren();
  at("welcome").hidden = false;
  for (const panel of [panels.figures, panels.timeline, panels.depth, panels.decisions]) panel.clear();
  for (const name of ["timeline", "depth"]) stale(name, false);
  problem("");
  setStatus("");
  showTree();
  at("question").focus();
});
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(at("key").value.trim());
  at("key").value = "";
  problem("");
  loaded = load();
});
at("file").addEventListener("change", (event) => {
  if (event.target.files.length) attached.read(event.target.files[0], messages).then(() => at("question").focus());
  event.target.value = ""; // the same file can be chosen again
});
onDrop(at("drop"), (file) => attached.read(file, messages).then(() => at("question").focus()));
startTheme(at("theme"));
loaded = load();
