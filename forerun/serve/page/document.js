// The document of the next question: read as text in the browser, tokenised by the server, never shown as markup.

import { ServerError, json } from "./server.js";
import { count } from "./dom.js";

const PIECE_CHARS = 1 << 17; // counted at once: a fraction of a second
const PIECE_SLACK_TOKENS = 64; // words at the edges of pieces

export class Attached {
  constructor(line, remove, problem) {
    this._line = line;
    this._remove = remove;
    this._problem = problem;
    this._maxBytes = 8e6;
    this._maxChars = Infinity;
    this._version = 0;
    remove.addEventListener("click", () => this.clear());
    this.clear();
  }

  /** Largest request in bytes; characters and tokens that the context can hold. */
  limit(bytes, chars, tokens) {
    this._maxBytes = bytes;
    this._maxChars = chars;
    this._maxTokens = tokens;
  }

  clear() {
    this._version++;
    this.text = null;
    this._show("or drop one anywhere");
    this._remove.hidden = true;
  }

  get line() {
    return this._line.textContent;
  }

  /** Read a file; an error message where it is not a text document. */
  async read(file, before) {
    this._problem("");
    if (file.size > this._maxBytes) {
      this._problem(`${file.name} has ${count(file.size)} bytes, the limit of this server is ${count(this._maxBytes)}.`);
      return;
    }
    let text;
    try {
      text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    } catch {
      this._problem(`${file.name} is not a text file in UTF-8.`);
      return;
    }
    if (text.length > this._maxChars) {
      this._problem(`${file.name} has ${count(text.length)} characters, the context holds ${count(this._maxChars)} at the very `
        + `most (${count(this._maxTokens)} tokens). Choose a shorter one.`);
      return;
    }
    if (text.includes("\0") || !text.trim()) {
      this._problem(text.trim() ? `${file.name} is not a text file.` : `${file.name} is empty.`);
      return;
    }
    this.text = text;
    this._remove.hidden = false;
    await this._count(file.name, before);
  }

  async _count(name, before) {
    const mine = ++this._version;
    this._show(`${name} · counting tokens…`);
    try {
      if (this.text.length > PIECE_CHARS && !(await this._countPieces(name, mine))) return;
      const asked = { messages: [...before, { role: "user", content: this.text }] };
      const { tokens, context } = await json("/forerun/tokens", asked);
      if (mine !== this._version) return;
      const fits = tokens < context;
      this._show(`${name} · ${count(tokens)} of ${count(context)} tokens`);
      if (!fits) {
        this._problem(`${name} has ${count(tokens)} tokens with the conversation, the context holds ${count(context)}. `
          + "Choose a shorter one, or begin a new conversation.");
      }
    } catch (error) {
      if (mine !== this._version) return;
      this._show(name); // the question can be sent all the same
      if (error instanceof ServerError && error.status === 400) this._problem(error.message);
    }
  }

  /** Tokens of a long text, piece by piece; false as soon as they are too many. */
  async _countPieces(name, mine) {
    let tokens = 0;
    for (let at = 0; at < this.text.length; at += PIECE_CHARS) {
      this._show(`${name} · counting tokens… ${Math.round((100 * at) / this.text.length)}%`);
      const prompt = this.text.slice(at, at + PIECE_CHARS).toWellFormed();
      tokens += (await json("/tokenize", { prompt, add_special_tokens: false })).count;
      if (mine !== this._version) return false;
      if (tokens - PIECE_SLACK_TOKENS > this._maxTokens) {
        this.clear();
        this._problem(`${name} has more than ${count(tokens)} tokens, the context holds ${count(this._maxTokens)}. Choose a shorter one.`);
        return false;
      }
    }
    return true;
  }

  _show(text) {
    this._line.textContent = text;
  }
}

/** Files dropped anywhere on the page. */
export function onDrop(veil, read) {
  let inside = 0;
  const files = (event) => event.dataTransfer && [...event.dataTransfer.types].includes("Files");
  document.addEventListener("dragenter", (event) => {
    if (!files(event)) return;
    inside++;
    veil.hidden = false;
  });
  document.addEventListener("dragleave", () => {
    inside = Math.max(0, inside - 1);
    veil.hidden = inside === 0;
  });
  document.addEventListener("dragover", (event) => files(event) && event.preventDefault());
  document.addEventListener("drop", (event) => {
    inside = 0;
    veil.hidden = true;
    if (!files(event)) return;
    event.preventDefault();
    if (event.dataTransfer.files.length) read(event.dataTransfer.files[0]);
  });
}
