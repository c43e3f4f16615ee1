// Requests to the page's own server, and their errors as text. Does not touch the page.

const KEY = "forerun-key";

/** A failed request, with a message for the user. */
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

/** The response to a request; throws unless it is 2xx. A body makes it a POST. */
export async function send(path, body = undefined, signal = undefined) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const options = { method: body === undefined ? "GET" : "POST", headers, signal, cache: "no-store" };
  if (body !== undefined) options.body = JSON.stringify(body);
  let response;
  try {
    response = await fetch(path, options);
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
  let message = "";
  try {
    message = errorText((await response.json()).error);
  } catch {
    // no JSON: a proxy responded
  }
  return new ServerError(message || `The server answered ${response.status}.`, response.status);
}

/** An error object as sentences: the message, then the hint. */
export function errorText(error) {
  const end = ` (${error.hint})`;
  const message = error.hint && error.message.endsWith(end) ? error.message.slice(0, -end.length) : error.message;
  return [message, error.hint].filter(Boolean).map(sentence).join(" ");
}

function sentence(text) {
  const trimmed = text.trim();
  return trimmed.charAt(0).toUpperCase() + trimmed.slice(1) + (/[.!?]$/.test(trimmed) ? "" : ".");
}
