// Server-sent events of a fetch, which unlike EventSource can carry an API key and a body.

// The data of each event, as text.
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const lines = part.split("\n").filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// The API key, which is forgotten with the tab, and the form that asks for it.
export class Access {
  constructor(form) {
    this.form = form;
    this.input = form.querySelector("input");
    this.waiting = [];
    this.key = sessionStorage.getItem("kvruntime-key") ?? "";
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.key = this.input.value.trim();
      sessionStorage.setItem("kvruntime-key", this.key);
      form.hidden = true;
      for (const resolve of this.waiting.splice(0)) resolve();
    });
  }

  headers() {
    return this.key ? { Authorization: `Bearer ${this.key}` } : {};
  }

  // Resolves once a key has been entered; rejects when who asks for it does not want it any more.
  ask(signal) {
    if (this.form.hidden) {
      this.form.hidden = false;
      this.input.value = "";
      this.input.focus();
    }
    return new Promise((resolve, reject) => {
      this.waiting.push(resolve);
      signal.addEventListener("abort", () => reject(signal.reason));
    });
  }
}
