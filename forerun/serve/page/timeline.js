// The answer over time: prefill, then every pass of the model with the drafted tokens it accepted and rejected.

import { count, cursor, element, plural, seconds, shape } from "./dom.js";

const HEIGHT = 96; // of the steps
const REDRAW_MS = 120; // between two pictures of a streaming answer
const LANE = 14; // of the bar below them: drafting and verification time

export class Timeline {
  constructor(node) {
    this._lane = element("div", "lane");
    this._picture = element("div", "steps");
    this._readout = element("p", "quiet readout");
    this._readout.setAttribute("aria-live", "polite");
    this._steps = [];
    this._key = key();
    this._drawn = 0;
    node.append(this._lane, this._picture, this._key, this._readout);
    this._picture.setAttribute("role", "img");
    cursor(this._picture, () => this._steps.length, (event) => this._under(event), (at) => this._show(at));
    new ResizeObserver(() => this._draw()).observe(node);
    this.clear();
  }

  get filled() {
    return this._steps.length > 0;
  }

  clear() {
    this._steps = [];
    this._key.hidden = true;
    this._lane.replaceChildren();
    this._picture.replaceChildren();
    this._picture.hidden = true;
    this._rest = "Every pass of the model is shown here.";
    this._show(null);
  }

  /** While an answer streams: its chunks; the drafts of each pass are known only at the end. */
  live(view) {
    if (!view.steps.length || (view.steps.length > 1 && performance.now() - this._drawn < REDRAW_MS)) return;
    this._drawn = performance.now();
    this._lane.replaceChildren();
    this._steps = view.steps.map(([at, tokens]) => ({ at, tokens, drafted: null, draft: 0, verify: 0 }));
    this._start = view.live.first;
    this._rest = "Streaming…";
    this._draw();
    this._show(null);
  }

  /** The answer was stopped: there are no statistics. */
  stopped() {
    if (this._steps.length) this._rest = "Stopped: these are the chunks that arrived.";
    this._show(null);
  }

  /** When it is complete: the server's statistics. */
  final(figures) {
    this._steps = figures.timeline.map(([at, tokens, drafted, draft, verify]) => ({ at, tokens, drafted, draft, verify }));
    this._start = figures.ttft_s;
    this._drawLane(figures);
    const passes = plural(figures.steps, "pass", "passes");
    const cut = figures.timeline.length < figures.steps ? `, the first ${count(figures.timeline.length)} shown` : "";
    this._rest = `${passes} of the model for ${plural(figures.completion_tokens, "token")}${cut}: `
      + `${figures.accepted_length.toFixed(2)} tokens per pass, ${count(figures.accepted)} of `
      + `${count(figures.drafted)} drafted tokens accepted`;
    this._picture.setAttribute("aria-label", `Passes of the model over time. ${this._rest}. Arrow keys move from pass to pass.`);
    this._draw();
    this._show(null);
  }

  _drawLane(figures) {
    const decode = Math.max(0, figures.total_s - figures.ttft_s);
    const early = figures.provisional ? figures.provisional_s : null;
    const queued = Math.min(figures.queued_s, figures.ttft_s);
    const parts = early === null
      ? [["queued", queued], ["prompt", figures.ttft_s - queued]]
      : [["queued", queued], ["drafting", Math.max(0, early - queued)], ["early", Math.max(0, figures.ttft_s - early)]];
    parts.push(["draft", figures.draft_s], ["verify", figures.verify_s]);
    parts.push(["other", Math.max(0, decode - figures.draft_s - figures.verify_s)]);
    const names = {
      queued: "queued", prompt: "prefill", drafting: "drafted prefill", early: "provisional text",
      draft: "drafting", verify: "verification", other: "other",
    };
    const bar = element("div", "bar");
    const legend = element("p", "legend");
    for (const [name, value] of parts.filter(([, value]) => value > 0.0005)) {
      const part = element("span", `part ${name}`);
      part.style.flexGrow = value;
      part.title = `${names[name]}: ${seconds(value)}`;
      bar.append(part);
      const entry = element("span", "entry");
      entry.append(element("i", `swatch ${name}`), `${names[name]} ${seconds(value)}`);
      legend.append(entry);
    }
    this._lane.replaceChildren(bar, legend);
  }

  _draw() {
    const steps = this._steps;
    this._picture.hidden = this._key.hidden = steps.length < 2;
    if (this._picture.hidden) return;
    const width = Math.max(120, this._picture.clientWidth);
    const end = steps[steps.length - 1].at;
    const begin = Math.min(this._start, steps[0].at);
    const scale = (at) => ((at - begin) / Math.max(1e-6, end - begin)) * width;
    const tall = Math.max(4, ...steps.map((step) => Math.max(step.tokens, (step.drafted ?? 0) + 1)));
    const unit = (HEIGHT - 4) / tall;
    const picture = shape("svg", { width, height: HEIGHT + LANE, viewBox: `0 0 ${width} ${HEIGHT + LANE}` });
    this._edges = [];
    let left = 0;
    for (const [place, step] of steps.entries()) {
      const right = place ? scale(step.at) : Math.max(2, scale(step.at));
      picture.append(...bars(step, left, Math.max(right - left, 0.75), unit));
      this._edges.push([left, Math.max(right, left + 0.75)]);
      left = right;
    }
    this._mark = shape("rect", { class: "mark", y: 0, height: HEIGHT + LANE, width: 0 });
    picture.append(this._mark);
    this._picture.replaceChildren(picture);
  }

  _under(event) {
    const x = event.clientX - this._picture.getBoundingClientRect().left;
    const place = (this._edges ?? []).findIndex(([, right]) => x <= right);
    return place < 0 ? this._steps.length - 1 : place;
  }

  _show(at) {
    const step = at === null ? null : this._steps[at];
    if (this._mark) {
      const [left, right] = step && this._edges[at] ? this._edges[at] : [0, 0];
      this._mark.setAttribute("x", left);
      this._mark.setAttribute("width", Math.max(0, right - left));
    }
    if (!step) {
      this._readout.textContent = this._rest;
      return;
    }
    const parts = [`pass ${at + 1} at ${seconds(step.at)}`, plural(step.tokens, "token")];
    if (step.drafted) parts.push(`${Math.max(0, step.tokens - 1)} of ${step.drafted} drafted tokens accepted`);
    if (step.verify) parts.push(`drafting ${seconds(step.draft)}, verification ${seconds(step.verify)}`);
    this._readout.textContent = parts.join(" · ");
  }
}

/** The legend of the blocks of a pass. */
function key() {
  const made = element("p", "legend");
  const names = { own: "a pass’s own token", passed: "accepted drafts", failed: "rejected drafts" };
  for (const [kind, name] of Object.entries(names)) {
    const entry = element("span", "entry");
    entry.append(element("i", `swatch ${kind}`), name);
    made.append(entry);
  }
  return made;
}

/** One pass: the token it always gives, accepted and rejected drafts; below, drafting and verification time. */
function bars(step, x, width, unit) {
  const gap = width > 4 ? 1 : 0;
  const made = [];
  const block = (name, from, tokens) => {
    if (tokens > 0) {
      const y = HEIGHT - (from + tokens) * unit;
      made.push(shape("rect", { class: name, x, y, width: width - gap, height: Math.max(0.5, tokens * unit) }));
    }
  };
  block("own", 0, Math.min(1, step.tokens));
  block("passed", 1, step.tokens - 1);
  block("failed", Math.max(1, step.tokens), (step.drafted ?? 0) - Math.max(0, step.tokens - 1));
  const spent = step.draft + step.verify;
  if (spent > 0) {
    const share = ((width - gap) * step.draft) / spent;
    made.push(shape("rect", { class: "draft", x, y: HEIGHT + 4, width: share, height: LANE - 4 }));
    made.push(shape("rect", { class: "verify", x: x + share, y: HEIGHT + 4, width: width - gap - share, height: LANE - 4 }));
  }
  return made;
}
