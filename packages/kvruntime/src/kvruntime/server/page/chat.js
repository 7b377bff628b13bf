// The conversation: what was said, the answers as they come, and the requests that make them.

import { Refusal, complete } from "./completions.js";

const MOST_TOGETHER = 4;

export class Chat {
  // `onStart` is called when a request has become known by its id.
  constructor(parts, access, onStart) {
    Object.assign(this, parts); // log, welcome, spoken, send, sendFour, stop
    this.access = access;
    this.onStart = onStart;
    this.exchanges = []; // questions with their answers, without the system prompt, which may change
    this.abort = null;
    this.answers = new Map(); // id of a request -> the elements that show its answers
  }

  get isBusy() {
    return this.abort !== null;
  }

  // Ask once, or `times` at once; the first answer goes on as the conversation.
  async ask(text, options, times = 1) {
    if (this.isBusy) return;
    this.welcome.hidden = true;
    const { exchanges } = this; // other ones after a new chat has begun
    const exchange = [{ role: "user", content: text }];
    this.log.append(element("div", "said", text));
    const body = {
      messages: [
        ...(options.system ? [{ role: "system", content: options.system }] : []),
        ...exchanges.flat(),
        ...exchange,
      ],
      n: options.n,
      max_tokens: options.maxTokens,
      temperature: options.temperature,
    };
    const group = element("div", "answers");
    this.log.append(group);
    this.begin();
    const { signal } = this.abort;
    const count = Math.min(times, MOST_TOGETHER);
    const asked = Array.from({ length: count }, (_, index) => {
      const names = Array.from({ length: options.n }, (_, n) => nameOf(index, count, n, options.n));
      const retry = () => this.again(exchange, group, options, times);
      return this.answer(body, group, names, signal, retry);
    });
    const [first] = await Promise.all(asked);
    if (first) {
      // A question without an answer would be asked again with the next.
      exchange.push({ role: "assistant", content: first });
      exchanges.push(exchange);
    }
    this.end();
    if (exchanges === this.exchanges) this.spoken.textContent = first || "No answer came.";
  }

  begin() {
    this.abort = new AbortController();
    this.send.disabled = this.sendFour.disabled = true;
    this.stop.disabled = false;
    this.scroll(true);
  }

  end() {
    this.abort = null;
    this.send.disabled = this.sendFour.disabled = false;
    this.stop.disabled = true;
    this.scroll(true);
  }

  // Take a question back, with what became of it, and ask it again.
  again(exchange, group, options, times) {
    if (this.isBusy) return;
    this.exchanges = this.exchanges.filter((each) => each !== exchange);
    group.previousElementSibling.remove();
    group.remove();
    this.ask(exchange[0].content, options, times);
  }

  // Stream one request into its elements; the text of its first answer.
  async answer(body, group, names, signal, retry) {
    const views = names.map((name) => new Answer(name));
    group.append(...views.map((view) => view.root));
    let id = null;
    try {
      for await (const chunk of complete(body, this.access, signal)) {
        if (id === null && chunk.id) {
          id = chunk.id;
          this.answers.set(id, views);
          this.onStart();
        }
        for (const choice of chunk.choices) views[choice.index]?.add(choice);
        if (chunk.usage) views.at(-1).use(chunk.usage, views.length);
        this.scroll();
      }
      for (const view of views) view.end("done");
    } catch (error) {
      const isStopped = error.name === "AbortError";
      if (!isStopped && !(error instanceof Refusal)) console.error(error);
      for (const view of views) view.end(isStopped ? "stopped" : "failed");
      for (const view of views.slice(1)) if (!view.text) view.root.remove();
      if (!isStopped) views[0].fail(error instanceof Refusal ? error.message : "This page failed.", retry);
    } finally {
      this.answers.delete(id);
    }
    return views[0].text;
  }

  // Show answers in the colours that their requests have on the map.
  colour(requests, palette) {
    for (const request of requests) {
      // A completion may have several prompts, and then a request of the engine for each.
      const id = request.name.replace(/-\d+$/, "");
      for (const view of this.answers.get(id) ?? []) view.colour(palette.of(request.id));
    }
  }

  clear() {
    this.abort?.abort();
    this.exchanges = [];
    this.log.replaceChildren(this.welcome);
    this.welcome.hidden = false;
  }

  scroll(always = false) {
    const { log } = this;
    if (always || log.scrollHeight - log.scrollTop - log.clientHeight < 120) log.scrollTop = log.scrollHeight;
  }
}

class Answer {
  constructor(name) {
    this.root = element("div", "answer");
    this.root.dataset.state = "streaming";
    this.name = element("div", "name", name);
    this.body = element("div", "text");
    this.facts = element("div", "facts");
    this.root.append(this.name, this.body, this.facts);
    this.began = performance.now();
    this.first = 0;
    this.text = "";
  }

  add(choice) {
    const content = choice.delta?.content ?? "";
    if (content) {
      this.first ||= performance.now();
      this.text += content;
      this.body.append(content); // as text: whatever a model says, it is no HTML
    }
    if (choice.finish_reason) {
      this.end("done");
      if (choice.finish_reason === "length") this.say("cut off at the longest answer");
    }
  }

  // What the whole request took, all its answers together.
  use(usage, numAnswers) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    const seconds = (performance.now() - this.began) / 1000;
    this.say(`${usage.prompt_tokens} prompt tokens${cached ? `, ${cached} of them cached` : ""}`);
    const where = numAnswers > 1 ? ` in all ${numAnswers} answers` : "";
    this.say(`${usage.completion_tokens} generated${where}, in ${seconds.toFixed(1)} s`);
  }

  say(fact) {
    this.facts.textContent += `${this.facts.textContent ? " · " : ""}${fact}`;
  }

  end(state) {
    if (this.root.dataset.state !== "streaming") return;
    this.root.dataset.state = state;
    if (state === "stopped") this.say("stopped");
  }

  fail(message, retry) {
    const root = element("div", "error", message);
    const button = element("button", "", "Try again");
    button.type = "button";
    button.addEventListener("click", retry);
    root.append(button);
    this.root.append(root);
  }

  colour(colour) {
    const name = `answer c${colour}`;
    if (this.root.className !== name) this.root.className = name;
  }
}

function nameOf(index, count, n, samples) {
  const request = count > 1 ? `Request ${index + 1} of ${count}` : "";
  const sample = samples > 1 ? `answer ${n + 1} of ${samples}` : "";
  const both = [request, sample].filter(Boolean).join(", ");
  return both ? both[0].toUpperCase() + both.slice(1) : "Answer";
}

function element(name, className, text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}
