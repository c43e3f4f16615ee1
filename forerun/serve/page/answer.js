// A streamed answer on the page: provisional text in grey, black once confirmed, struck out when retracted.
// All text is inserted as text: nothing in a document or an answer can become markup. A complete answer is shown as
// Markdown, where it has some; a button shows the text.

import { rendered } from "./markdown.js";
import { element, seconds, rate } from "./dom.js";

export class AnswerView {
  /** `onFigures` is called on every change of the live figures. */
  constructor(onFigures = () => {}) {
    this.node = element("div", "answer");
    this._head = element("span", "final");
    this._retracted = element("del", "retracted");
    this._rest = element("span", "final");
    this._provisional = element("span", "provisional");
    this.node.append(this._head, this._retracted, this._rest, this._provisional);
    this._retracted.hidden = true;
    this._onFigures = onFigures;
    this.text = "";
    this.confirmed = "";
    this.statistics = null;
    this.steps = []; // [seconds, tokens] of every chunk, for the live timeline
    this.live = { shown: null, first: null, tokens: 0, provisional: 0, confirmed: 0, retracted: 0, last: 0 };
  }

  provisional(text, tokens, at) {
    this._provisional.append(text);
    this.live.shown ??= at;
    this.live.provisional += tokens;
    this._changed();
  }

  confirm(text, tokens) {
    this.confirmed += text;
    this._head.textContent = this.confirmed;
    this._head.classList.add("confirmed");
    this._provisional.textContent = this._provisional.textContent.slice(text.length);
    this.live.confirmed += tokens;
  }

  retract(text, tokens) {
    this._provisional.textContent = "";
    this._retracted.textContent = text;
    this._retracted.hidden = false;
    this._retracted.title = "Provisional text that the exact answer does not have";
    this.live.retracted = tokens;
    this._changed();
  }

  content(text, tokens, at) {
    if (this.live.confirmed + this.live.retracted >= this.live.provisional) this._provisional.textContent = ""; // all of it is resolved
    this.text += text;
    const confirmed = this.confirmed.length;
    if (this._rest.textContent === "" && this.text.length <= confirmed) {
      this._head.textContent = this.confirmed; // all of it is on the page already
    } else {
      this._head.textContent = this.text.slice(0, confirmed);
      this._rest.textContent = this.text.slice(confirmed);
    }
    const live = this.live;
    live.shown ??= at;
    if (live.first === null) {
      live.first = at;
      live.start = tokens ?? 1; // tokens of the first chunk: their time is the prompt's, not decoding's
    }
    this.steps.push([at, (tokens ?? live.tokens + 1) - live.tokens]);
    live.tokens = tokens ?? live.tokens + 1;
    live.last = at;
    this._changed();
  }

  statistics_(figures) {
    this.statistics = figures;
  }

  /** The listener of `streamAnswer`. */
  get listener() {
    return {
      provisional: (...event) => this.provisional(...event),
      confirm: (...event) => this.confirm(...event),
      retract: (...event) => this.retract(...event),
      content: (...event) => this.content(...event),
      statistics: (...event) => this.statistics_(...event),
    };
  }

  /** The answer was stopped: provisional text that is left is retracted. */
  abandon() {
    if (this._provisional.textContent) this.retract(this._provisional.textContent, this.live.provisional - this.live.confirmed);
  }

  /** The answer is complete, or was stopped. */
  finish() {
    const nodes = rendered(this.text);
    const markdown = element("div", "rendered");
    markdown.append(...nodes);
    if (!this.text || (nodes.every((node) => node.tagName === "P" && !node.childElementCount))) return; // plain text
    const toggle = element("button", "plain as-text", "Show as text");
    toggle.type = "button";
    toggle.addEventListener("click", () => this._asText(toggle, markdown, !markdown.hidden));
    this.node.append(markdown, toggle);
    this._asText(toggle, markdown, false);
  }

  _asText(toggle, markdown, is) {
    markdown.hidden = is;
    this._head.hidden = this._rest.hidden = !is;
    toggle.textContent = is ? "Show as Markdown" : "Show as text";
  }

  /** Tokens per second after the first chunk; null before the second. */
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
