// The page as a whole: the conversation, the question, and who is told when something happens.

import { AnswerView } from "./answer.js";
import { DepthMap } from "./depth.js";
import { Attached, watchDrops } from "./document.js";
import { Figures } from "./figures.js";
import { Race, pointless } from "./race.js";
import { ServerError, hasKey, json, setKey } from "./server.js";
import { Settings } from "./settings.js";
import { ask } from "./stream.js";
import { startTheme } from "./theme.js";
import { Timeline } from "./timeline.js";
import { TreeView } from "./tree.js";
import { element, plural, seconds } from "./words.js";

const at = (id) => document.getElementById(id);

const panels = {
  figures: new Figures(at("figures")),
  timeline: new Timeline(at("timeline")),
  depth: new DepthMap(at("depth")),
  tree: new TreeView(at("tree")),
};
const settings = new Settings(at);
const attached = new Attached(at("document"), at("remove"), problem);
let messages = []; // the conversation so far, as the server gets it
let running = null; // the AbortController of the answer in the making
let begun = null; // settles when the server has said what it is

// -- asking -----------------------------------------------------------------------------------------------------------

/** The conversation with the new question; a document stands before it, so that what follows shares it. */
function withQuestion() {
  const question = at("question").value.trim();
  const content = attached.text === null ? question : `${attached.text}\n\n${question}`;
  return [question, [...messages, { role: "user", content }]];
}

async function askQuestion() {
  const [question, asked] = withQuestion();
  if (running || !ready(question)) return;
  const turn = element("li", "turn");
  turn.append(...askedWords(question));
  const view = new AnswerView(watch);
  for (const [name, value] of [["role", "article"], ["aria-label", "Answer"], ["aria-live", "polite"], ["aria-busy", "true"]]) {
    view.node.setAttribute(name, value); // read out when it is complete, not word by word
  }
  turn.append(view.node);
  at("turns").append(turn);
  reveal(turn);
  at("question").value = "";
  const line = element("p", "quiet line");
  turn.append(line);
  const ended = await during(async (signal) => {
    panels.figures.waiting();
    const reason = await ask(settings.body(asked), view.listener, signal);
    return `Answer complete: ${plural(view.live.tokens, "token")}, first word after ${seconds(view.live.shown)}`
      + `${reason === "length" ? "; it ended at the longest answer allowed" : ""}.`;
  });
  if (!turn.isConnected) return; // a new conversation has begun: this one is no part of it
  view.abandon();
  view.node.setAttribute("aria-busy", "false");
  panels.figures.rest(view);
  line.textContent = view.line;
  reveal(line);
  if (!ended && !view.text) {
    at("question").value = at("question").value || question; // nothing came of it: it can be asked again
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
    problem("Both sides would do the same: choose another prefill, or let somebody guess ahead.");
    return;
  }
  const made = new Race(askedWords(question), { prefill: body.forerun.prefill, speculate: body.forerun.speculate });
  at("turns").append(made.node);
  reveal(made.node);
  const ended = await during((signal) =>
    made.run(body, signal, watch));
  reveal(made.node.lastChild);
  if (ended) await inspect(asked, made.winner);
}

/** Whether what a panel shows is about an answer that is not the latest any more. */
function stale(name, is) {
  document.querySelector(`#${name}-h .before`).hidden = !is || !panels[name].filled;
}

/** An answer that comes in, as the panels show it. */
function watch(view) {
  if (!view.node.isConnected) return; // of a conversation that was left
  panels.figures.live(view);
  panels.timeline.live(view);
  if (view.steps.length) stale("timeline", false);
  follow();
  if (!running) return; // words that are struck as an answer is stopped
  say(view.live.first === null ? "Provisional words, while the exact prompt is computed…" : "Answering…");
}

/** Around whatever runs: one at a time, can be stopped, says how it ended. True when it went well. */
async function during(work) {
  running = new AbortController();
  problem("");
  at("welcome").hidden = true;
  busy(true);
  for (const name of ["timeline", "depth"]) stale(name, true);
  say("Waiting for the first word…");
  try {
    await begun; // a question may be asked before the server has said which model it has
    say(await work(running.signal));
    return true;
  } catch (error) {
    if (error.name === "AbortError") say("Stopped.");
    else failed(error);
    return false;
  } finally {
    running = null;
    busy(false);
  }
}

/** What the panels say once all is known. */
async function inspect(asked, view) {
  const figures = view.statistics;
  panels.figures.final(view);
  if (!figures) {
    panels.timeline.left();
  } else {
    panels.timeline.final(figures);
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

/** Where the conversation has its own place to scroll, what comes in is kept in sight, unless somebody reads above. */
function follow() {
  const box = at("scroll");
  if (box.scrollHeight - box.scrollTop - box.clientHeight < 120) box.scrollTop = box.scrollHeight;
}

function reveal(node) {
  node.scrollIntoView({ block: "nearest" });
}

// -- words ------------------------------------------------------------------------------------------------------------

function ready(question) {
  if (question) return true;
  problem(attached.text === null ? "There is no question yet." : "The document is here; now ask something about it.");
  at("question").focus();
  return false;
}

function askedWords(question) {
  const words = [element("p", "asked", question)];
  if (attached.text !== null) words.unshift(element("p", "quiet with", attached.line));
  return words;
}

function say(text) {
  at("status").textContent = text;
}

function problem(text) {
  at("problem").textContent = text;
}

function failed(error) {
  say("");
  if (error instanceof ServerError && error.status === 401) {
    at("key-form").hidden = false;
    at("key").focus();
    problem(hasKey() ? error.message : "");
    return;
  }
  problem(error instanceof ServerError ? error.message : `Something on this page failed: ${error.message}`);
  if (!(error instanceof ServerError)) console.error(error);
}

function busy(is) {
  at("stop").disabled = !is;
  at("ask").disabled = at("race").disabled = is;
  if (!is && document.activeElement === document.body) at("question").focus(); // the button that had it is disabled
}

// -- beginning --------------------------------------------------------------------------------------------------------

async function begin() {
  try {
    const about = await json("/forerun/about");
    at("key-form").hidden = true;
    const facts = [about.model, `${about.weights} weights`, `on ${about.device}`, `${about.context.toLocaleString("en")} tokens of context`];
    at("about").textContent = facts.join(" · ");
    document.title = `Forerun · ${about.model}`;
    settings.offer(about);
    attached.limit(about.max_body_bytes);
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
  for (const panel of [panels.figures, panels.timeline, panels.depth]) panel.clear();
  for (const name of ["timeline", "depth"]) stale(name, false);
  problem("");
  say("");
  showTree();
  at("question").focus();
});
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(at("key").value.trim());
  at("key").value = "";
  problem("");
  begun = begin();
});
at("file").addEventListener("change", (event) => {
  if (event.target.files.length) attached.take(event.target.files[0], messages).then(() => at("question").focus());
  event.target.value = ""; // the same file can be chosen again
});
watchDrops(at("drop"), (file) => attached.take(file, messages).then(() => at("question").focus()));
startTheme(at("theme"));
begun = begin();
