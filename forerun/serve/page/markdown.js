// Markdown as elements: headings, lists, quotes, tables, code, emphasis, links. What is not one of those stays text.
// Everything is made by `element` with text: there is no way from an answer to markup, attributes or other addresses than
// http and https.

import { element } from "./dom.js";

// Each takes time linear in the line: lookaheads say where a repetition ends, so that none is tried at shorter lengths
const FENCE = /^ {0,3}(`{3,}(?!`)|~{3,}(?!~))\s*(?!\s)([\w+#.-]*)(?![\w+#.-])[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const CLOSING = /^#+$/; // of a heading, as its last word
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}>\s?(.*)$/;
const DIVIDER = /^\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)+\|?$|^\|\s*:?-+:?\s*\|$/; // of a trimmed line
const INLINE = [
  [/^(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)/, (found) => element("code", "", found[2].trim() || found[2])],
  [/^\*\*(?=\S)([\s\S]*?\S)\*\*/, (found, depth) => inside("strong", found[1], depth)],
  [/^__(?=\S)([\s\S]*?\S)__(?!\w)/, (found, depth) => inside("strong", found[1], depth)],
  [/^\*(?=[^\s*])([\s\S]*?[^\s*])\*(?!\*)/, (found, depth) => inside("em", found[1], depth)],
  [/^_(?=[^\s_])([\s\S]*?[^\s_])_(?!\w)/, (found, depth) => inside("em", found[1], depth)],
  [/^~~(?=\S)([\s\S]*?\S)~~/, (found, depth) => inside("s", found[1], depth)],
  [/^\[([^\]\n]{1,500})\]\((\S{1,2000}?)(?:\s+"[^"\n]*")?\)/, (found, depth) => link(found[1], found[2], depth)],
  [/^<?(https?:\/\/[^\s<>"'`)\]]{1,2000}[^\s<>"'`)\].,;:!?])>?/, (found, depth) => link(found[1], found[1], depth)],
];
const SPECIAL = /[`*_~[<h\\]/g;
const MAX_DEPTH = 8; // of quotes, lists and emphasis in each other
const MAX_SPAN = 5000; // characters in which the end of an inline mark is looked for: no answer takes quadratic time

/** Nodes of a text. */
export function rendered(text) {
  return blocks(text.replace(/\r\n?/g, "\n").split("\n"), 0);
}

function blocks(lines, depth) {
  const made = [];
  let at = 0;
  while (at < lines.length) {
    const [node, next] = block(lines, at, depth);
    if (node) made.push(node);
    at = next;
  }
  return made;
}

/** The block that begins at a line, and the line after it. */
function block(lines, at, depth) {
  const line = lines[at];
  let found;
  if (!line.trim()) return [null, at + 1];
  if ((found = FENCE.exec(line))) return fenced(lines, at, found);
  if ((found = HEADING.exec(line))) return [inside(`h${Math.min(6, found[1].length + 2)}`, title(found[2].trim()), 0), at + 1];
  if (RULE.test(line)) return [element("hr"), at + 1];
  if (depth < MAX_DEPTH && QUOTE.test(line)) {
    const end = extent(lines, at, (next) => QUOTE.test(next));
    const quote = element("blockquote");
    quote.append(...blocks(lines.slice(at, end).map((one) => QUOTE.exec(one)[1]), depth + 1));
    return [quote, end];
  }
  if (depth < MAX_DEPTH && ITEM.test(line)) return list(lines, at, depth);
  if (line.includes("|") && at + 1 < lines.length && DIVIDER.test(lines[at + 1].trim())) return table(lines, at);
  const end = extent(lines, at + 1, (next) => next.trim() && !begins(next)) ;
  return [inside("p", lines.slice(at, end).join("\n"), 0), end];
}

/** A heading's text without the marks that close it: `C#` keeps its own. */
function title(text) {
  const last = text.slice(text.lastIndexOf(" ") + 1);
  return CLOSING.test(last) ? text.slice(0, text.length - last.length).trimEnd() : text;
}

function begins(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
}

function extent(lines, at, belongs) {
  while (at < lines.length && belongs(lines[at])) at++;
  return at;
}

function fenced(lines, at, [, mark, language]) {
  const closing = new RegExp(`^ {0,3}${mark[0]}{${mark.length},}\\s*$`);
  const end = extent(lines, at + 1, (line) => !closing.test(line));
  const box = element("pre");
  const code = element("code", "", lines.slice(at + 1, end).join("\n"));
  if (language) code.dataset.language = language;
  box.append(code);
  return [box, end + 1];
}

function list(lines, at, depth) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const numbered = /\d/.test(mark);
  const made = element(numbered ? "ol" : "ul");
  if (numbered) made.start = parseInt(mark, 10);
  while (at < lines.length) {
    const found = ITEM.exec(lines[at]);
    if (!found || found[1].length !== indent.length || /\d/.test(found[2]) !== numbered) break;
    const deeper = (line) => (line.trim() ? /^\s*/.exec(line)[0].length > indent.length : false);
    let end = extent(lines, at + 1, deeper);
    while (end + 1 < lines.length && !lines[end].trim() && deeper(lines[end + 1])) end = extent(lines, end + 1, deeper);
    const rest = lines.slice(at + 1, end);
    const shift = Math.min(...rest.filter((line) => line.trim()).map((line) => /^\s*/.exec(line)[0].length), 99);
    const entry = element("li");
    entry.append(...inline(found[3], 0), ...blocks(rest.map((line) => line.slice(shift)), depth + 1));
    made.append(entry);
    at = end;
    if (at + 1 < lines.length && !lines[at].trim() && ITEM.test(lines[at + 1])) at++;
  }
  return [made, at];
}

function table(lines, at) {
  const end = extent(lines, at + 2, (line) => line.includes("|"));
  const made = element("table");
  [at, ...Array.from({ length: end - at - 2 }, (_, i) => at + 2 + i)].forEach((number, i) => {
    const row = element("tr");
    const cells = lines[number].trim().replace(/^\||\|$/g, "").split("|");
    row.append(...cells.map((cell) => inside(i ? "td" : "th", cell.trim(), 0)));
    made.append(row);
  });
  return [made, end];
}

function inside(tag, text, depth) {
  const made = element(tag);
  made.append(...inline(text, depth + 1));
  return made;
}

/** Text with emphasis, code and links as nodes. */
function inline(text, depth) {
  if (depth > MAX_DEPTH) return [text];
  const made = [];
  let plain = "";
  let at = 0;
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const next = SPECIAL.exec(text)?.index ?? text.length;
    plain += text.slice(at, next);
    at = next;
    if (at >= text.length) break;
    if (text[at] === "\\" && /[\\`*_{}[\]()#+\-.!~|<>]/.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
      continue;
    }
    const [node, length] = span(text, at, depth);
    if (node) {
      made.push(plain, node);
      plain = "";
    } else {
      plain += text[at];
    }
    at += node ? length : 1;
  }
  return [...made, plain].filter((part) => part !== "");
}

function span(text, at, depth) {
  const word = at > 0 && /\w/.test(text[at - 1]);
  const rest = text.slice(at, at + MAX_SPAN);
  for (const [pattern, make] of INLINE) {
    const found = pattern.exec(rest);
    if (!found || (word && (rest[0] === "_" || rest[0] === "h"))) continue;
    const node = make(found, depth);
    if (node) return [node, found[0].length];
  }
  return [null, 0];
}

/** A link to another site, which does not learn where it was clicked; null where the address is no http. */
function link(text, address, depth) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return null;
  }
  if (!["http:", "https:"].includes(url.protocol)) return null;
  const made = element("a");
  made.append(...(text === address ? [text] : inline(text, depth + 1)));
  Object.assign(made, { href: url.href, target: "_blank", rel: "noopener noreferrer", title: url.href });
  return made;
}
