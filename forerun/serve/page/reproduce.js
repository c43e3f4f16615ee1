// A request of the page as a command and as a program, to be run elsewhere. An API key is never part of them.

import { hasKey } from "./server.js";
import { element } from "./dom.js";

const MAX_ARGUMENT_CHARS = 20_000; // of four bytes at most, quoted or not: Linux takes 131,071 bytes in an argument

/** Folded until it is opened: the request may hold a document. */
export function reproduceNode(body) {
  const node = element("details", "reproduce");
  node.append(element("summary", "quiet", "Reproduce this request"));
  node.addEventListener("toggle", () => {
    if (!node.open || node.childElementCount > 1) return;
    for (const [name, text] of [["curl", curl(body)], ["Python", python(body)]]) {
      const copy = element("button", "plain", `Copy as ${name}`);
      copy.type = "button";
      copy.addEventListener("click", async () => {
        await navigator.clipboard.writeText(text);
        copy.textContent = "Copied";
      });
      const box = element("pre", name.toLowerCase(), text);
      box.tabIndex = 0;
      node.append(copy, box);
    }
  });
  return node;
}

/** Without what only this page reads. */
function plainBody({ forerun, ...body }) {
  const { statistics, ...own } = forerun;
  return { ...body, forerun: own };
}

function curl(body) {
  const text = JSON.stringify(plainBody(body)); // of one line
  const key = hasKey() ? ' -H "authorization: Bearer $FORERUN_API_KEY"' : "";
  const head = `curl -sN ${location.origin}/v1/chat/completions -H 'content-type: application/json'${key}`;
  if (text.length > MAX_ARGUMENT_CHARS) return `${head} --data-binary @- <<'END'\n${text}\nEND\n`;
  return `${head} -d '${text.replaceAll("'", "'\\''")}'\n`;
}

function python(body) {
  const { forerun, ...asked } = plainBody(body);
  const key = hasKey() ? 'os.environ["FORERUN_API_KEY"]' : '"none"';
  return [
    ...(hasKey() ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${location.origin}/v1", api_key=${key})`,
    `asked = ${literal(asked)}`,
    `for chunk in client.chat.completions.create(**asked, extra_body={"forerun": ${literal(forerun)}}):`,
    "    if chunk.choices:",
    '        print(chunk.choices[0].delta.content or "", end="", flush=True)',
    "",
  ].join("\n");
}

/** A value in Python's notation: JSON's, but for three names. */
function literal(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value !== "object") return JSON.stringify(value);
  return `{${Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${literal(item)}`).join(", ")}}`;
}
