// Helpers of all parts of the page: elements, formatted numbers, a cursor for pictures.

/** An element with a class and text; never markup. */
export function element(tag, name = "", text = "") {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text) made.textContent = text;
  return made;
}

export function shape(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

export function count(number) {
  return Math.round(number).toLocaleString("en");
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  return value < 0.995 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(value < 9.95 ? 2 : 1)} s`;
}

export function rate(value) {
  return value === null || value === undefined ? "–" : value.toFixed(value < 9.95 ? 2 : 1);
}

export function percent(part, whole) {
  return whole ? `${Math.round((100 * part) / whole)}%` : "–";
}

export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

/**
 * Make a picture of `size()` parts readable by mouse and keyboard: `show(i)` is called for the part under the pointer
 * or the cursor keys, `show(null)` when the pointer or the focus leaves. `find(event)`: the part under a pointer.
 */
export function cursor(picture, size, find, show) {
  let at = -1;
  const go = (place) => {
    if (!size()) return;
    at = Math.max(0, Math.min(size() - 1, place));
    show(at);
  };
  picture.tabIndex = 0;
  picture.addEventListener("pointermove", (event) => go(find(event)));
  picture.addEventListener("pointerdown", (event) => go(find(event)));
  picture.addEventListener("pointerleave", () => document.activeElement !== picture && show(null));
  picture.addEventListener("focus", () => go(Math.max(at, 0)));
  picture.addEventListener("blur", () => show(null));
  picture.addEventListener("keydown", (event) => {
    const move = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: size() - 1, PageUp: at - 10, PageDown: at + 10 };
    if (!(event.key in move)) return;
    event.preventDefault();
    go(move[event.key]);
  });
}
