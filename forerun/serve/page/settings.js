// Requests from the fields of the page. Modes, drafters and limits are the server's, from /forerun/about.

import { element } from "./dom.js";

export class Settings {
  constructor(at) {
    this._at = at;
    this._model = "";
    at("settings").addEventListener("input", () => this._changed());
    if (matchMedia("(max-width: 40rem)").matches) at("settings").open = false;
    this._changed();
  }

  /** `about`: what `/forerun/about` returned. */
  offer(about) {
    this._model = about.model;
    const before = this._mode;
    const modes = Object.entries(about.prefill).map(([mode, problem]) => choice(mode, problem, mode === before));
    this._at("modes").replaceChildren(...modes);
    const problems = new Set(Object.values(about.prefill).filter((problem) => problem !== null).map(short));
    this._at("prefill-why").textContent = problems.size ? `Not available: ${[...problems].join("; ")}.` : "";
    for (const [id, option] of Object.entries({ temperature: "temperature", budget: "budget" })) {
      const { minimum, maximum, description } = about.options[option];
      const field = this._at(id);
      if (minimum !== undefined) field.min = minimum;
      if (maximum !== undefined) field.max = maximum;
      field.title = description ?? "";
    }
    const chosen = this._at("speculation").value;
    this._at("speculation").replaceChildren(...about.speculation.map((name) => element("option", "", name)));
    this._at("speculation").value = about.speculation.includes(chosen) ? chosen : "auto";
    this._at("max-tokens").max = about.context;
    this._changed();
  }

  get _mode() {
    return this._at("prefill").querySelector("input:checked").value;
  }

  /** A request body, with the statistics that the panels show. */
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
      forerun: { prefill, speculation: this._at("speculation").value, statistics: "steps" },
    };
    if (body.temperature > 0) body.seed = Math.floor(Math.random() * 2 ** 31);
    return body;
  }

  _changed() {
    const mode = this._mode;
    this._at("budget").disabled = mode === "exact";
    this._at("settings-line").textContent = `${mode} prefill, speculation ${this._at("speculation").value}`;
  }
}

/** A radio button of a prefill mode; disabled with its reason where the server has a problem with it. */
function choice(mode, problem, checked) {
  const label = element("label");
  const box = element("input");
  Object.assign(box, { type: "radio", name: "prefill", value: mode, checked, disabled: problem !== null });
  label.title = problem ?? "";
  label.append(box, ` ${mode}`);
  return label;
}

function number(field, otherwise) {
  return Number.isNaN(field.valueAsNumber) ? otherwise : field.valueAsNumber;
}

/** Problems name the mode they are about; one for all modes is enough. */
function short(problem) {
  return problem.replace(/^prefill '\w+' /, "drafting a prompt ").replace(/\.$/, "");
}
