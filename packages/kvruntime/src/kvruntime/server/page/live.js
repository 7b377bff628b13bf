// The stream of snapshots, opened again whenever it ends, and closed while nobody looks.

import { events } from "./sse.js";

const LONGEST_WAIT = 5000;

export class LiveStream {
  constructor(url, access, { onSnapshot, onState }) {
    Object.assign(this, { url, access, onSnapshot, onState });
    this.abort = null;
    this.wait = 500;
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) this.abort?.abort();
    });
  }

  async run() {
    for (;;) {
      await visible();
      this.abort = new AbortController();
      try {
        await this.follow(this.abort.signal);
        this.onState("lost", "the server has ended; trying again");
      } catch (error) {
        const isBusy = error.status === 503;
        const text = isBusy ? "the server loads or ends; trying again" : "no connection; trying again";
        if (error.name !== "AbortError") this.onState("lost", text);
      }
      if (document.hidden) continue;
      await new Promise((resolve) => setTimeout(resolve, this.wait));
      this.wait = Math.min(2 * this.wait, LONGEST_WAIT);
    }
  }

  async follow(signal) {
    const response = await fetch(this.url, { headers: this.access.headers(), signal, cache: "no-store" });
    if (response.status === 401) {
      this.onState("lost", "an API key is needed");
      await this.access.ask(signal);
      this.wait = 0;
      return;
    }
    if (!response.ok) throw Object.assign(new Error(), { status: response.status });
    for await (const data of events(response.body)) {
      this.wait = 500;
      this.onState("live", "live");
      this.onSnapshot(JSON.parse(data));
    }
  }
}

function visible() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) => {
    document.addEventListener("visibilitychange", () => resolve(), { once: true });
  });
}
