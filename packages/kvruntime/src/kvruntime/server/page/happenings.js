// The line of events: what the scheduler and the block manager did, the newest first.

export class EventList {
  constructor(list, onNew) {
    this.list = list;
    this.onNew = onNew;
    this.known = new Set();
    this.isFirst = true;
  }

  show(events) {
    const keys = events.map((event) => JSON.stringify(event));
    const fresh = events.filter((_, index) => !this.known.has(keys[index]));
    if (!fresh.length && !this.isFirst) return;
    this.known = new Set(keys);
    this.list.replaceChildren(...events.map(item).reverse());
    // What happened before this page was opened needs no notice.
    if (!this.isFirst) this.onNew(fresh);
    this.isFirst = false;
  }
}

function item(event) {
  const root = document.createElement("li");
  root.className = event.kind.split(/[ ,]/)[0];
  const step = document.createElement("span");
  step.className = "step";
  step.textContent = `step ${event.step}`;
  const what = document.createElement("span");
  const kind = document.createElement("b");
  kind.textContent = event.kind;
  const detail = document.createElement("span");
  detail.className = "detail";
  detail.textContent = event.detail ? `: ${event.detail}` : "";
  what.append(subject(event), kind, detail);
  root.append(step, what);
  return root;
}

function subject(event) {
  return event.request === null ? "" : `request ${event.request}${event.sequence ? `.${event.sequence}` : ""} `;
}
