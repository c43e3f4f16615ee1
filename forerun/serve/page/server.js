// What the page asks its own server, and how errors become words. Nothing here touches the page.

const KEY = "forerun-key";

/** An answer other than the one asked for, in words. */
export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

export function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

/** The response to a request, if it is a good one; a body makes it a POST. */
export async function send(path, body = undefined, signal = undefined) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const asked = { method: body === undefined ? "GET" : "POST", headers, signal, cache: "no-store" };
  if (body !== undefined) asked.body = JSON.stringify(body);
  let response;
  try {
    response = await fetch(path, asked);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached. Is it still running?");
  }
  if (!response.ok) throw await failure(response);
  return response;
}

export async function json(path, body = undefined, signal = undefined) {
  return (await send(path, body, signal)).json();
}

async function failure(response) {
  let words = "";
  try {
    words = inWords((await response.json()).error);
  } catch {
    // no JSON: somebody between us and the server answered
  }
  return new ServerError(words || `The server answered ${response.status}.`, response.status);
}

/** An error object as sentences: what is wrong, then the way out. */
export function inWords(error) {
  const end = ` (${error.hint})`;
  const message = error.hint && error.message.endsWith(end) ? error.message.slice(0, -end.length) : error.message;
  return [message, error.hint].filter(Boolean).map(sentence).join(" ");
}

function sentence(text) {
  const trimmed = text.trim();
  return trimmed.charAt(0).toUpperCase() + trimmed.slice(1) + (/[.!?]$/.test(trimmed) ? "" : ".");
}
