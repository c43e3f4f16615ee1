// What a request asks for, from the fields of the page; offers only what this server can do, and says why not.

import { element } from "./words.js";

export class Settings {
  constructor(at) {
    this._at = at;
    this._model = "";
    at("settings").addEventListener("input", () => this._changed());
    if (matchMedia("(max-width: 40rem)").matches) at("settings").open = false;
    this._changed();
  }

  /** `about`: what the server says of itself. */
  offer(about) {
    this._model = about.model;
    const reasons = new Set();
    for (const box of this._at("prefill").querySelectorAll("input")) {
      const why = about.prefill[box.value];
      box.disabled = why !== null;
      box.parentNode.title = why ?? "";
      if (why !== null) reasons.add(short(why));
    }
    this._at("prefill-why").textContent = reasons.size ? `Not here: ${[...reasons].join("; ")}.` : "";
    const chosen = this._at("speculate").value;
    this._at("speculate").replaceChildren(...about.speculate.map((name) => element("option", "", name)));
    this._at("speculate").value = about.speculate.includes(chosen) ? chosen : "auto";
    this._at("max-tokens").max = about.context;
    this._changed();
  }

  get _mode() {
    return this._at("prefill").querySelector("input:checked").value;
  }

  /** A request, with all the figures that the panels show. */
  body(messages) {
    const mode = this._mode;
    const budget = this._at("budget").valueAsNumber;
    const prefill = mode === "exact" || Number.isNaN(budget) ? mode : { mode, budget };
    const body = {
      model: this._model,
      messages,
      stream: true,
      temperature: number(this._at("temperature"), 0),
      max_completion_tokens: number(this._at("max-tokens"), 160),
      forerun: { prefill, speculate: this._at("speculate").value, statistics: "steps" },
    };
    if (body.temperature > 0) body.seed = Math.floor(Math.random() * 2 ** 31);
    return body;
  }

  _changed() {
    const mode = this._mode;
    this._at("budget").disabled = mode === "exact";
    this._at("settings-line").textContent = `${mode} prefill, speculate ${this._at("speculate").value}`;
  }
}

function number(field, otherwise) {
  return Number.isNaN(field.valueAsNumber) ? otherwise : field.valueAsNumber;
}

/** Reasons name the mode they are about; one reason for all of them is enough. */
function short(why) {
  return why.replace(/^prefill '\w+' /, "drafting a prompt ").replace(/\.$/, "");
}
