// Whether the server still responds: asked now and then, and at once after a failure. A slow response is no failure, as
// another program may have the cores.

const IDLE_MS = 15_000;
const GONE_MS = 2_000;

export class Alive {
  /** `onBack` is called when a server that was gone responds again. */
  constructor(notice, onBack) {
    this._notice = notice;
    this._onBack = onBack;
    this._since = null;
    this._timer = setTimeout(() => this.check(), IDLE_MS);
    document.addEventListener("visibilitychange", () => document.hidden || this.check());
  }

  get gone() {
    return this._since !== null;
  }

  async check() {
    clearTimeout(this._timer);
    if (this._checking) return;
    this._checking = true;
    try {
      const response = await fetch("/ready", { cache: "no-store" });
      if (response.status === 503) this._show("The server is shutting down: it takes no new questions.");
      else this._respond();
    } catch {
      this._since ??= new Date();
      this._show(`The server has gone: ${location.host} has not responded since ${this._since.toLocaleTimeString()}. `
        + "This page tries again by itself; nothing of the conversation is lost.");
    }
    this._checking = false;
    if (!document.hidden) this._timer = setTimeout(() => this.check(), this.gone ? GONE_MS : IDLE_MS);
  }

  _respond() {
    const was = this.gone;
    this._since = null;
    this._show("");
    if (was) this._onBack();
  }

  _show(text) {
    if (this._notice.textContent !== text) this._notice.textContent = text;
    this._notice.hidden = !text;
  }
}
