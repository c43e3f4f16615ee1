// The race: one request twice, one after the other, both without the cache: plain, and with the settings of the page.

import { AnswerView } from "./answer.js";
import { json } from "./server.js";
import { streamAnswer } from "./stream.js";
import { element, plural, rate, seconds } from "./dom.js";

export const PLAIN = { prefill: "exact", speculation: "off" };

let plainFirst = false; // the order alternates: the second run may profit from a warm machine

/** Whether both sides have the same settings. */
export function pointless(own) {
  const mode = typeof own.prefill === "string" ? own.prefill : own.prefill.mode;
  return mode === "exact" && own.speculation === "off";
}

export class Race {
  constructor(asked, own) {
    plainFirst = !plainFirst;
    this.node = element("li", "race");
    this.node.append(...asked);
    const lanes = element("div", "lanes");
    this._sides = [side("Plain", "exact prefill, no drafts", PLAIN), side("Forerun", named(own), own)];
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
    this._note.textContent = `One after the other on this server, ${this._order[0].name} first. Neither reads K/V of the `
      + "other or of earlier requests: both start with a cold cache."
      + (others ? ` ${plural(others, "other answer")} ran when it began, which affects the times.` : "");
    for (const one of this._order) {
      one.node.classList.add("running");
      const forerun = { ...body.forerun, ...one.settings, cache: false, statistics: "steps" };
      one.view = new AnswerView(tick);
      one.place.replaceChildren(one.view.node);
      const clock = ticking(one);
      try {
        one.reason = await streamAnswer({ ...body, forerun }, one.view.listener, signal);
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
      ["First token on the page", plain.view.live.shown, own.view.live.shown, seconds, false],
      ["First confirmed token", plain.view.live.first, own.view.live.first, seconds, false],
      ["Tokens per second after it", plain.view.rate, own.view.rate, rate, true],
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
    return `The race is over: first token ${seconds(plain.view.live.shown)} plain, ${seconds(own.view.live.shown)} Forerun; `
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
  const clock = setInterval(show, 100); // no more often: on one machine the page competes with the server
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
  return `${prefill} prefill${budget}, ${own.speculation === "off" ? "no drafts" : `drafts by ${own.speculation}`}`;
}

/** Forerun against plain as text, and whether that is worse. */
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
  const drafted = report && !own.statistics.provisional ? report.accepted : 0;
  const why = drafted
    ? `Speculative prefill is approximate: ${plural(drafted, "prompt token")} used drafted K/V.`
    : "Where two tokens are equally likely, rounding can decide between them.";
  return `The answers differ from character ${at + 1} on. ${why}`;
}
