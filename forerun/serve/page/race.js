// The race: one request twice, one after the other, both with a cold cache: plain, and with the settings of the page.

import { AnswerView } from "./answer.js";
import { json } from "./server.js";
import { ask } from "./stream.js";
import { element, plural, rate, seconds } from "./words.js";

export const PLAIN = { prefill: "exact", speculate: "off" };

let plainFirst = false; // the order changes from race to race: whoever is second may find the machine warm

/** Whether both sides would do the same. */
export function pointless(own) {
  const mode = typeof own.prefill === "string" ? own.prefill : own.prefill.mode;
  return mode === "exact" && own.speculate === "off";
}

export class Race {
  constructor(asked, own) {
    plainFirst = !plainFirst;
    this.node = element("li", "race");
    this.node.append(...asked);
    const lanes = element("div", "lanes");
    this._sides = [side("Plain", "exact prefill, no guesses", PLAIN), side("Forerun", named(own), own)];
    lanes.append(...this._sides.map((one) => one.node));
    this._note = element("p", "quiet note");
    this._summary = element("div", "summary");
    this.node.append(lanes, this._note, this._summary);
    this._order = plainFirst ? this._sides : [...this._sides].reverse();
  }

  get winner() {
    return this._sides[1].view;
  }

  /** Run both sides; returns a sentence for the status line. */
  async run(body, signal, tick) {
    const others = (await json("/forerun/stats", undefined, signal)).open;
    this._note.textContent = `One after the other on this server, ${this._order[0].name} first. Neither reads what the `
      + "other or any earlier request left: both start with a cold cache."
      + (others ? ` ${plural(others, "other answer")} ran when it began, so times are not clean.` : "");
    for (const one of this._order) {
      one.node.classList.add("running");
      const forerun = { ...body.forerun, ...one.settings, cache: false, statistics: "steps" };
      one.view = new AnswerView(tick);
      one.place.replaceChildren(one.view.node);
      const clock = ticking(one);
      try {
        one.reason = await ask({ ...body, forerun }, one.view.listener, signal);
        one.total = (performance.now() - clock.start) / 1000;
      } finally {
        clock.stop();
        one.node.classList.remove("running");
        one.view.abandon();
      }
    }
    return this._sum();
  }

  _sum() {
    const [plain, own] = this._sides;
    const rows = [
      ["First word on the page", plain.view.live.shown, own.view.live.shown, seconds, false],
      ["First word that stands", plain.view.live.first, own.view.live.first, seconds, false],
      ["Tokens a second after it", plain.view.rate, own.view.rate, rate, true],
      ["Whole answer", plain.total, own.total, seconds, false],
    ];
    const table = element("table");
    const head = element("tr");
    head.append(...["", "Plain", "Forerun", ""].map((text) => element("th", "", text)));
    table.append(head);
    for (const [name, left, right, form, higher] of rows) {
      const line = element("tr");
      line.append(element("th", "", name), element("td", "", form(left)), element("td", "", form(right)));
      const [words, worse] = compared(left, right, higher);
      line.append(element("td", worse ? "factor worse" : "factor", words));
      table.append(line);
    }
    this._summary.replaceChildren(table, element("p", "quiet", texts(plain.view, own.view)));
    return `The race is over: first word ${seconds(plain.view.live.shown)} plain, ${seconds(own.view.live.shown)} Forerun; `
      + `whole answer ${seconds(plain.total)} and ${seconds(own.total)}.`;
  }
}

function side(name, how, settings) {
  const node = element("section", "lane-of-race");
  const clock = element("p", "clock", "waiting");
  const place = element("div");
  node.append(element("h3", "", name), element("p", "quiet", how), clock, place);
  node.setAttribute("aria-label", name);
  return { name, node, clock, place, settings, view: new AnswerView(), total: null };
}

function ticking(one) {
  const start = performance.now();
  const show = () => {
    const line = one.view.line;
    one.clock.textContent = `${((performance.now() - start) / 1000).toFixed(1)} s${line ? ` · ${line}` : ""}`;
  };
  const clock = setInterval(show, 100); // no more often: on one machine the page takes its time from the server
  show();
  return {
    start,
    stop: () => {
      clearInterval(clock);
      one.clock.textContent = `${seconds((performance.now() - start) / 1000)} · ${one.view.line}`;
    },
  };
}

function named(own) {
  const prefill = typeof own.prefill === "string" ? own.prefill : own.prefill.mode;
  const budget = own.prefill.budget ? ` at ${own.prefill.budget}` : "";
  return `${prefill} prefill${budget}, ${own.speculate === "off" ? "no guesses" : `guesses by ${own.speculate}`}`;
}

/** How Forerun did against plain, in words, and whether that is worse. */
function compared(plain, own, higher) {
  if (!plain || !own) return ["", false];
  const gain = higher ? own / plain : plain / own;
  if (gain > 0.97 && gain < 1.03) return ["the same", false];
  const [good, bad] = higher ? ["faster", "slower"] : ["sooner", "later"];
  return gain > 1 ? [`${gain.toFixed(2)}× ${good}`, false] : [`${(1 / gain).toFixed(2)}× ${bad}`, true];
}

function texts(plain, own) {
  if (plain.text === own.text) return "Both answers are the same, character for character.";
  let at = 0;
  while (plain.text[at] === own.text[at]) at++;
  const report = own.statistics && own.statistics.prefill;
  const kept = report && !own.statistics.provisional ? report.accepted : 0;
  const why = kept
    ? `Speculative prefill is approximate: ${plural(kept, "prompt token")} kept drafted K/V.`
    : "Where two words are as likely as each other, rounding can decide between them.";
  return `The answers differ from character ${at + 1} on. ${why}`;
}
