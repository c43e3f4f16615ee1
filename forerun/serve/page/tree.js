// The prefix tree: which runs of tokens are cached, how often each was read, and this conversation's path in it.

import { json } from "./server.js";
import { count, element, plural } from "./dom.js";

const MAX_INDENTS = 8; // deeper ones would leave no room for text

export class TreeView {
  constructor(node) {
    this._line = element("p", "quiet");
    this._list = element("ul", "tree");
    node.append(this._line, this._list);
    this._line.textContent = "Prefixes that requests share are computed once and cached here.";
    this._version = 0;
  }

  /** `messages`: the conversation whose path is marked; the server sends no other text. */
  async refresh(messages) {
    const mine = ++this._version;
    const found = await json("/forerun/tree", messages.length ? { messages } : undefined);
    if (mine === this._version) this._draw(found);
  }

  _draw(found) {
    const runs = found.runs;
    const read = runs.reduce((sum, run) => sum + run.reads * run.tokens, 0);
    const more = found.left_out ? `, ${count(found.left_out)} more not shown` : "";
    this._line.textContent = runs.length
      ? `${count(found.tokens)} tokens in ${plural(runs.length + found.left_out, "run")}${more}; `
        + `${count(read)} tokens were read instead of computed`
      : "Nothing is cached yet: it fills with the first answer.";
    const largest = Math.max(1, ...runs.map((run) => run.tokens));
    this._list.replaceChildren();
    const depths = [];
    const lists = [];
    for (const [place, run] of runs.entries()) {
      depths[place] = run.parent < 0 ? 0 : depths[run.parent] + 1;
      const item = element("li", run.shared ? "mine" : "");
      item.append(row(run, largest));
      if (run.parent >= 0) {
        lists[run.parent] ??= this._below(run.parent, depths[place]);
        lists[run.parent].append(item);
      } else {
        this._list.append(item);
      }
      item.dataset.place = place;
      this._items ??= new Map();
      this._items.set(place, item);
    }
  }

  _below(parent, depth) {
    const list = element("ul", depth > MAX_INDENTS ? "flat" : "");
    this._items.get(parent).append(list);
    return list;
  }
}

function row(run, largest) {
  const line = element("div", "run");
  const bar = element("span", "size");
  bar.style.width = `${Math.max(2, (100 * Math.log1p(run.tokens)) / Math.log1p(largest))}%`;
  bar.style.opacity = run.reads ? Math.min(1, 0.45 + 0.18 * Math.log2(1 + run.reads)) : 0.25;
  const words = [plural(run.tokens, "token"), run.reads ? `read ${times(run.reads)}` : "not read yet"];
  if (run.branches > 1) words.push(`${run.branches} continuations`);
  if (run.readers) words.push("in use");
  const facts = element("span", "facts", words.join(" · "));
  if (run.shared) facts.append(element("em", "", "this conversation"));
  line.append(bar, facts);
  if (run.text) line.append(element("q", "quiet", run.text.replace(/\s+/g, " ").trim()));
  return line;
}

function times(number) {
  return number === 1 ? "once" : number === 2 ? "twice" : `${count(number)} times`;
}
