// Why an answer was computed as it was: from its statistics, in sentences. `decisions` has the engine's own reasons for
// drafting or not, with the number of passes of each.

import { count, element, plural, seconds } from "./dom.js";

export class Decisions {
  constructor(node) {
    this._node = node;
    this.clear();
  }

  clear() {
    this._node.replaceChildren(element("li", "quiet", "After an answer."));
  }

  final(figures) {
    this._node.replaceChildren(...[...prompt(figures), ...answer(figures), ...reasons(figures)].map((text) => element("li", "", text)));
  }
}

function prompt({ prompt_tokens, cached_tokens, prefill, provisional, confirmed }) {
  const found = [`${count(cached_tokens)} of ${plural(prompt_tokens, "prompt token")} were read from the cache, the rest was computed.`];
  if (prefill && prefill.fell_back) found.push(`The prompt was computed exactly: ${prefill.fell_back}.`);
  else if (prefill) found.push(`The prompt was drafted by ${prefill.source}, at ${prefill.cost.toFixed(2)} of exact's cost.`);
  else found.push("The prompt was computed exactly, as asked.");
  if (provisional) found.push(`${count(confirmed)} of ${plural(provisional, "provisional token")} were confirmed.`);
  return found;
}

function answer({ drafted, drafters, steps, completion_tokens, lossless, verifier, plain_s, total_s, ttft_s }) {
  if (!drafted) return ["Nothing was drafted: by measured costs no drafter was expected to pay, or it is off."];
  const named = Object.entries(drafters).filter(([, tally]) => tally.drafted)
    .map(([name, tally]) => `${name} (${count(tally.accepted)} of ${count(tally.drafted)} accepted)`);
  const found = [`Drafted by ${named.join(", ")}: ${plural(completion_tokens, "token")} in ${plural(steps, "pass", "passes")}.`];
  if (plain_s) found.push(`Without drafts it would have taken about ${seconds(plain_s)}; it took ${seconds(total_s - ttft_s)}.`);
  found.push(lossless ? `The ${verifier} verifier gives what plain decoding gives: the answer is exact.`
    : `The ${verifier} verifier is not exact: the answer may differ from plain decoding's.`);
  return found;
}

const WORDS = { "by lower bound": "these drafts pay, by what is accepted at the least and what passes cost" };

function reasons({ decisions }) {
  const found = Object.entries(decisions || {}).filter(([why]) => why).sort((a, b) => b[1] - a[1]);
  if (!found.length) return [];
  return [`Why, pass by pass: ${found.map(([why, passes]) => `${WORDS[why] || why} (${count(passes)})`).join("; ")}.`];
}
