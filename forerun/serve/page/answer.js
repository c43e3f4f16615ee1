// An answer on the page while it comes: provisional words in grey, black once confirmed, struck out when taken back.
// All text goes in as text: nothing that a document or a model says can become markup.

import { element, seconds, rate } from "./words.js";

export class AnswerView {
  /** `onFigures` hears of every change of the live figures. */
  constructor(onFigures = () => {}) {
    this.node = element("div", "answer");
    this._head = element("span", "settled");
    this._taken = element("del", "retracted");
    this._rest = element("span", "settled");
    this._maybe = element("span", "provisional");
    this.node.append(this._head, this._taken, this._rest, this._maybe);
    this._taken.hidden = true;
    this._onFigures = onFigures;
    this.text = "";
    this.confirmed = "";
    this.statistics = null;
    this.steps = []; // [seconds, tokens] of every piece that came, for the live timeline
    this.live = { shown: null, first: null, tokens: 0, early: 0, stood: 0, taken: 0, last: 0 };
  }

  provisional(text, tokens, at) {
    this._maybe.append(text);
    this.live.shown ??= at;
    this.live.early += tokens;
    this._changed();
  }

  confirm(text, tokens) {
    this.confirmed += text;
    this._head.textContent = this.confirmed;
    this._head.classList.add("confirmed");
    this._maybe.textContent = this._maybe.textContent.slice(text.length);
    this.live.stood += tokens;
  }

  retract(text, tokens) {
    this._maybe.textContent = "";
    this._taken.textContent = text;
    this._taken.hidden = false;
    this._taken.title = "Provisional words that the model took back";
    this.live.taken = tokens;
    this._changed();
  }

  content(text, tokens, at) {
    if (this.live.stood + this.live.taken >= this.live.early) this._maybe.textContent = ""; // nothing is open any more
    this.text += text;
    const stands = this.confirmed.length;
    if (this._rest.textContent === "" && this.text.length <= stands) {
      this._head.textContent = this.confirmed; // all of it is on the page already
    } else {
      this._head.textContent = this.text.slice(0, stands);
      this._rest.textContent = this.text.slice(stands);
    }
    const live = this.live;
    live.shown ??= at;
    if (live.first === null) {
      live.first = at;
      live.start = tokens ?? 1; // tokens that the first piece brought: they took the prompt's time, not decoding's
    }
    this.steps.push([at, (tokens ?? live.tokens + 1) - live.tokens]);
    live.tokens = tokens ?? live.tokens + 1;
    live.last = at;
    this._changed();
  }

  statistics_(figures) {
    this.statistics = figures;
  }

  /** What `stream.ask` talks to. */
  get listener() {
    return {
      provisional: (...told) => this.provisional(...told),
      confirm: (...told) => this.confirm(...told),
      retract: (...told) => this.retract(...told),
      content: (...told) => this.content(...told),
      statistics: (...told) => this.statistics_(...told),
    };
  }

  /** Words that nobody will confirm any more, as the answer was stopped. */
  abandon() {
    if (this._maybe.textContent) this.retract(this._maybe.textContent, this.live.early - this.live.stood);
  }

  /** Tokens a second after the first; null before there is such a thing. */
  get rate() {
    const { tokens, start, first, last } = this.live;
    return first !== null && last > first && tokens > start ? (tokens - start) / (last - first) : null;
  }

  get line() {
    const { shown, first, tokens } = this.live;
    const parts = [];
    if (shown !== null && shown !== first) parts.push(`first word ${seconds(shown)}`);
    if (first !== null) parts.push(shown === first ? `first word ${seconds(first)}` : `confirmed ${seconds(first)}`);
    if (this.rate !== null) parts.push(`${rate(this.rate)} tokens/s`);
    if (tokens) parts.push(`${tokens} tokens`);
    return parts.join(" · ");
  }

  _changed() {
    this._onFigures(this);
  }
}
