// The figures of the latest answer: live while it comes, as the server counted them afterwards.

import { count, element, percent, rate, seconds } from "./words.js";

export class Figures {
  constructor(node) {
    this._node = node;
    this._clock = 0;
    this.clear();
  }

  clear() {
    clearInterval(this._clock);
    this._show([["Time to first word", "–"], ["Tokens a second", "–"], ["Prompt from cache", "–"], ["Tokens a pass", "–"]]);
  }

  /** Nothing has come yet: the time so far. */
  waiting() {
    const start = performance.now();
    this.clear();
    const tick = () => this._set("Time to first word", `${((performance.now() - start) / 1000).toFixed(1)} s…`);
    this._clock = setInterval(tick, 100); // no more often: on one machine the page takes its time from the server
    tick();
  }

  live(view) {
    clearInterval(this._clock);
    this._set("Time to first word", seconds(view.live.shown));
    this._set("Tokens a second", rate(view.rate));
  }

  rest(view) {
    clearInterval(this._clock);
    this._set("Time to first word", seconds(view.live.shown));
  }

  final(view) {
    this.rest(view);
    const told = view.statistics;
    if (!told) return;
    const rows = [["Time to first word", seconds(view.live.shown)]];
    if (view.live.shown !== view.live.first) rows.push(["First word that stands", seconds(view.live.first)]);
    rows.push(["Tokens a second", rate(view.rate ?? told.tokens_per_second)]);
    rows.push(["Prompt from cache", `${count(told.cached_tokens)} of ${count(told.prompt_tokens)}`]);
    rows.push(["Tokens a pass", told.accepted_length.toFixed(2)]);
    if (told.provisional) rows.push(["Provisional words kept", percent(told.confirmed, told.provisional)]);
    if (told.prefill && !told.prefill.fell_back) rows.push(["Prefill work", `${told.prefill.cost.toFixed(2)} of exact`]);
    this._show(rows);
  }

  _show(rows) {
    this._node.replaceChildren();
    this._values = new Map();
    for (const [name, value] of rows) {
      const entry = element("div");
      const told = element("dd", "", value);
      entry.append(element("dt", "", name), told);
      this._values.set(name, told);
      this._node.append(entry);
    }
  }

  _set(name, value) {
    const told = this._values.get(name);
    if (told) told.textContent = value;
  }
}
