// One streamed answer: server-sent events, passed to a listener. Knows no page and no settings.

import { ServerError, errorText, send } from "./server.js";

/**
 * Send a request, and call `listener` for each event, with its time in seconds since the request:
 * provisional(text, tokens), confirm(text, tokens), retract(text, tokens), content(text, tokens so far),
 * statistics(figures). Returns the finish reason.
 */
export async function streamAnswer(body, listener, signal) {
  const start = performance.now();
  const response = await send("/v1/chat/completions", body, signal);
  let reason = null;
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return reason;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(errorText(chunk.error));
    reason = dispatch(chunk, listener, (performance.now() - start) / 1000) ?? reason;
  }
  throw new ServerError("The server closed the connection before the answer was complete.");
}

function dispatch(chunk, listener, at) {
  const own = chunk.forerun;
  if (own && ["provisional", "confirm", "retract"].includes(own.event)) listener[own.event](own.text, own.tokens, at);
  if (own && own.statistics) listener.statistics(own.statistics, at);
  const choice = chunk.choices[0];
  if (!choice) return null;
  const text = choice.delta.content;
  if (text) listener.content(text, own ? own.tokens : null, at);
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
