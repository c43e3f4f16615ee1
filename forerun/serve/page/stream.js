// One answer as it comes: server-sent events, told to a listener. Knows no page and no settings.

import { ServerError, inWords, send } from "./server.js";

/**
 * Ask, and tell `heard` of all that comes, each with its time in seconds since asking:
 * provisional(text, tokens), confirm(text, tokens), retract(text, tokens), content(text, tokens so far),
 * statistics(figures). Returns why the answer ended.
 */
export async function ask(body, heard, signal) {
  const start = performance.now();
  const response = await send("/v1/chat/completions", body, signal);
  let reason = null;
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return reason;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(inWords(chunk.error));
    reason = tell(chunk, heard, (performance.now() - start) / 1000) ?? reason;
  }
  throw new ServerError("The server closed the connection before the answer was complete.");
}

function tell(chunk, heard, at) {
  const own = chunk.forerun;
  if (own && ["provisional", "confirm", "retract"].includes(own.event)) heard[own.event](own.text, own.tokens, at);
  if (own && own.statistics) heard.statistics(own.statistics, at);
  const choice = chunk.choices[0];
  if (!choice) return null;
  const text = choice.delta.content;
  if (text) heard.content(text, own ? own.tokens : null, at);
  return choice.finish_reason;
}

/** The data of each event of a stream. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (part.startsWith("data: ")) yield part.slice(6);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
