// The prompt's depth map: which tokens were computed, recomputed over drafted K/V, or accepted as drafted.

import { count, cursor, element, percent, plural, shape } from "./dom.js";

export const KINDS = {
  cached: "read from the cache",
  exact: "computed exactly",
  recomputed: "recomputed",
  accepted: "drafted, accepted",
  tail: "question, always computed",
};

/** Runs of tokens of one kind and depth: {kind, depth, from, to}; all of them cover the prompt. */
export function runsOf(figures) {
  const report = figures.prefill;
  const total = figures.prompt_tokens;
  const drafted = report && !report.fell_back && report.depth_runs.length > 0;
  if (!drafted) return whole(figures.cached_tokens, total, report ? report.layers : 0);
  const runs = [];
  const end = report.exact + report.drafted; // the tail comes after it
  let at = 0;
  for (const [depth, tokens] of report.depth_runs) {
    for (let from = at; from < at + tokens;) {
      const to = Math.min(at + tokens, ...[report.exact, end].filter((edge) => edge > from));
      const kind = from < report.exact ? "exact" : from >= end ? "tail" : depth < report.layers ? "accepted" : "recomputed";
      runs.push({ kind, depth, from, to });
      from = to;
    }
    at += tokens;
  }
  return runs;
}

function whole(cached, total, depth) {
  const runs = [{ kind: "cached", depth, from: 0, to: cached }, { kind: "exact", depth, from: cached, to: total }];
  return runs.filter((run) => run.to > run.from);
}

export class DepthMap {
  constructor(node) {
    this._strip = element("div", "strip");
    this._strip.setAttribute("role", "img");
    this._legend = element("p", "legend");
    this._readout = element("p", "quiet readout");
    this._readout.setAttribute("aria-live", "polite");
    this._text = element("div", "prompt-text");
    this._text.tabIndex = 0;
    this._text.setAttribute("role", "region");
    this._text.setAttribute("aria-label", "The prompt, coloured by depth");
    node.append(this._strip, this._legend, this._readout, this._text);
    cursor(this._strip, () => this._runs.length, (event) => this._under(event), (at) => this._show(at, true));
    this._text.addEventListener("pointermove", (event) => {
      const place = event.target.dataset ? event.target.dataset.run : undefined;
      if (place !== undefined) this._show(Number(place), false);
    });
    this._text.addEventListener("pointerleave", () => this._show(null, false));
    this.clear();
  }

  get filled() {
    return this._runs.length > 0;
  }

  clear() {
    this._runs = [];
    this._spans = [];
    for (const part of [this._strip, this._legend, this._text]) {
      part.replaceChildren();
      part.hidden = true;
    }
    this._rest = "After an answer: which tokens of its prompt were computed, recomputed or accepted as drafted.";
    this._show(null, false);
  }

  /** `pieces`: the prompt's tokens as text, or nothing where they are not known. */
  draw(figures, pieces) {
    this._runs = runsOf(figures);
    this._layers = figures.prefill ? figures.prefill.layers : 0;
    this._total = figures.prompt_tokens;
    this._rest = summary(figures);
    this._drawStrip();
    this._drawLegend();
    this._drawText(pieces.length === this._total ? pieces : []);
    this._show(null, false);
  }

  _drawStrip() {
    const picture = shape("svg", { viewBox: `0 0 ${this._total} 10`, preserveAspectRatio: "none" });
    for (const run of this._runs) {
      const box = shape("rect", { class: `depth ${run.kind}`, x: run.from, y: 0, width: run.to - run.from, height: 10 });
      box.style.fillOpacity = this._heat(run);
      picture.append(box);
    }
    this._mark = shape("rect", { class: "mark", y: 0, height: 10, width: 0 });
    picture.append(this._mark);
    this._strip.replaceChildren(picture);
    this._strip.hidden = false;
    this._strip.setAttribute("aria-label", `The prompt from left to right. ${this._rest}. Arrow keys move from run to run.`);
  }

  _drawLegend() {
    const entries = Object.entries(KINDS).map(([kind, name]) => {
      const tokens = this._runs.filter((run) => run.kind === kind).reduce((sum, run) => sum + run.to - run.from, 0);
      if (!tokens) return null;
      const entry = element("span", "entry");
      entry.dataset.kind = kind;
      entry.dataset.tokens = tokens;
      entry.append(element("i", `swatch ${kind}`), `${name} ${count(tokens)} (${percent(tokens, this._total)})`);
      return entry;
    });
    this._legend.replaceChildren(...entries.filter(Boolean));
    this._legend.hidden = false;
  }

  _drawText(pieces) {
    this._spans = !pieces.length ? [] : this._runs.map((run, place) => {
      const span = element("span", `depth ${run.kind}`, pieces.slice(run.from, run.to).join(""));
      span.style.setProperty("--heat", this._heat(run));
      span.dataset.run = place;
      return span;
    });
    this._text.replaceChildren(...this._spans);
    this._text.hidden = !this._spans.length;
  }

  /** The fewer layers were computed, the stronger. */
  _heat(run) {
    return run.kind === "accepted" && this._layers ? 0.35 + 0.65 * (1 - run.depth / this._layers) : 1;
  }

  _under(event) {
    const box = this._strip.getBoundingClientRect();
    const token = ((event.clientX - box.left) / box.width) * this._total;
    const place = this._runs.findIndex((run) => token < run.to);
    return place < 0 ? this._runs.length - 1 : place;
  }

  _show(at, scroll) {
    const run = at === null ? null : this._runs[at];
    if (this._mark) {
      this._mark.setAttribute("x", run ? run.from : 0);
      this._mark.setAttribute("width", run ? run.to - run.from : 0);
    }
    for (const span of this._text.querySelectorAll(".shown")) span.classList.remove("shown");
    if (!run) {
      this._readout.textContent = this._rest;
      return;
    }
    const span = this._spans[at];
    if (span) span.classList.add("shown");
    if (span && scroll) this._text.scrollTop = span.offsetTop - this._text.offsetTop - this._text.clientHeight / 3;
    const where = run.to - run.from === 1 ? `token ${count(run.from + 1)}` : `tokens ${count(run.from + 1)}–${count(run.to)}`;
    const deep = this._layers && run.depth ? ` · ${plural(run.depth, "layer")} of ${this._layers} computed by the model` : "";
    this._readout.textContent = `${where} · ${KINDS[run.kind]}${deep}`;
  }
}

function summary(figures) {
  const report = figures.prefill;
  const tokens = plural(figures.prompt_tokens, "prompt token");
  if (!report) return `${tokens}, ${count(figures.cached_tokens)} of them read from the cache; nothing approximate`;
  if (report.fell_back) return `${tokens}, computed exactly instead: ${report.fell_back}`;
  const cost = `drafted by ${report.source} at ${report.cost.toFixed(2)} of exact prefill’s cost`;
  const then = figures.provisional ? "; the answer is from the exact prompt, only provisional text from this" : "";
  return `${tokens}, ${cost}${then}`;
}
