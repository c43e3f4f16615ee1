// The figures of the latest answer: measured in the browser while it streams, from the server's statistics afterwards.

import { count, element, percent, rate, seconds } from "./dom.js";

export class Figures {
  constructor(node) {
    this._node = node;
    this._clock = 0;
    this.clear();
  }

  clear() {
    clearInterval(this._clock);
    this._show([["Time to first token", "–"], ["Tokens per second", "–"], ["Prompt from cache", "–"], ["Tokens per pass", "–"]]);
  }

  /** Before the first chunk: the time so far. */
  waiting() {
    const start = performance.now();
    this.clear();
    const tick = () => this._set("Time to first token", `${((performance.now() - start) / 1000).toFixed(1)} s…`);
    this._clock = setInterval(tick, 100); // no more often: on one machine the page competes with the server
    tick();
  }

  live(view) {
    clearInterval(this._clock);
    this._set("Time to first token", seconds(view.live.shown));
    this._set("Tokens per second", rate(view.rate));
  }

  rest(view) {
    clearInterval(this._clock);
    this._set("Time to first token", seconds(view.live.shown));
  }

  final(view) {
    this.rest(view);
    const figures = view.statistics;
    if (!figures) return;
    const rows = [["Time to first token", seconds(view.live.shown)]];
    if (view.live.shown !== view.live.first) rows.push(["First confirmed token", seconds(view.live.first)]);
    rows.push(["Tokens per second", rate(view.rate ?? figures.tokens_per_second)]);
    rows.push(["Prompt from cache", `${count(figures.cached_tokens)} of ${count(figures.prompt_tokens)}`]);
    rows.push(["Tokens per pass", figures.accepted_length.toFixed(2)]);
    if (figures.provisional) rows.push(["Provisional confirmed", percent(figures.confirmed, figures.provisional)]);
    if (figures.prefill && !figures.prefill.fell_back) rows.push(["Prefill cost", `${figures.prefill.cost.toFixed(2)} of exact`]);
    this._show(rows);
  }

  _show(rows) {
    this._node.replaceChildren();
    this._values = new Map();
    for (const [name, value] of rows) {
      const entry = element("div");
      const cell = element("dd", "", value);
      entry.append(element("dt", "", name), cell);
      this._values.set(name, cell);
      this._node.append(entry);
    }
  }

  _set(name, value) {
    const cell = this._values.get(name);
    if (cell) cell.textContent = value;
  }
}
