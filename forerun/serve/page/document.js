// The document of the next question: read as text in the browser, counted by the server, never shown as markup.

import { json } from "./server.js";
import { count } from "./words.js";

export class Attached {
  constructor(line, remove, problem) {
    this._line = line;
    this._remove = remove;
    this._problem = problem;
    this._most = 8e6;
    this._taken = 0;
    remove.addEventListener("click", () => this.clear());
    this.clear();
  }

  /** Largest request in bytes. */
  limit(bytes) {
    this._most = bytes;
  }

  clear() {
    this._taken++;
    this.text = null;
    this._say("or drop one anywhere");
    this._remove.hidden = true;
  }

  get line() {
    return this._line.textContent;
  }

  /** Take a file in; says in words where that cannot be. */
  async take(file, before) {
    this._problem("");
    if (file.size > this._most) {
      this._problem(`${file.name} has ${count(file.size)} bytes, this server takes ${count(this._most)}.`);
      return;
    }
    let text;
    try {
      text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    } catch {
      this._problem(`${file.name} is not a text file in UTF-8.`);
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
    const mine = ++this._taken;
    this._say(`${name} · counting tokens…`);
    try {
      const asked = { messages: [...before, { role: "user", content: this.text }] };
      const { tokens, context } = await json("/forerun/tokens", asked);
      if (mine !== this._taken) return;
      const fits = tokens < context;
      this._say(`${name} · ${count(tokens)} of ${count(context)} tokens`);
      if (!fits) {
        this._problem(`${name} has ${count(tokens)} tokens with the conversation, the context holds ${count(context)}. `
          + "Take a shorter one, or begin a new conversation.");
      }
    } catch {
      if (mine === this._taken) this._say(name); // it can be asked about all the same
    }
  }

  _say(text) {
    this._line.textContent = text;
  }
}

/** Files dropped anywhere on the page. */
export function watchDrops(veil, take) {
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
    if (event.dataTransfer.files.length) take(event.dataTransfer.files[0]);
  });
}
