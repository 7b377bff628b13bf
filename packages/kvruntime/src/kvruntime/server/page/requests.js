// The unfinished requests: who they are, and a strip for the block table of each sample.

import { Painter, prepare } from "./cells.js";

const MOST_REQUESTS = 24;
const MOST_SAMPLES = 8;
const WIDEST = 26;
const HEIGHT = 18;

export class RequestList {
  constructor(list, { count, none, more, onPoint }) {
    this.list = list;
    this.count = count;
    this.none = none;
    this.more = more;
    this.onPoint = onPoint;
    this.items = new Map();
  }

  show(scene, palette, theme) {
    const { requests } = scene.snapshot;
    const shown = requests.slice(0, MOST_REQUESTS);
    const present = new Set(shown.map((request) => request.id));
    for (const [id, item] of this.items) {
      if (present.has(id)) continue;
      item.root.remove();
      this.items.delete(id);
      this.onPoint(null);
    }
    for (const request of shown) {
      if (!this.items.has(request.id)) this.add(request.id);
      this.fill(this.items.get(request.id), request, scene, palette, theme);
    }
    this.count.textContent = requests.length ? String(requests.length) : "";
    this.none.hidden = requests.length > 0;
    this.more.hidden = requests.length <= MOST_REQUESTS;
    this.more.textContent = `and ${requests.length - MOST_REQUESTS} more`;
  }

  add(id) {
    const root = document.createElement("li");
    const head = element("div", "head");
    const [name, state, facts] = ["name", "state", "facts"].map((each) => element("span", each));
    head.append(name, state, facts);
    root.append(head);
    name.textContent = `request ${id}`;
    root.addEventListener("pointerenter", () => this.onPoint(id));
    root.addEventListener("pointerleave", () => this.onPoint(null));
    this.list.append(root);
    this.items.set(id, { root, state, facts, strips: new Map(), rest: null });
  }

  fill(item, request, scene, palette, theme) {
    item.root.className = `c${palette.of(request.id)}`;
    item.root.dataset.state = request.state;
    setText(item.state, stateOf(request));
    setText(item.facts, factsOf(request));
    const shown = request.sequences.slice(0, MOST_SAMPLES);
    const present = new Set(shown.map((sequence) => sequence.index));
    for (const [index, strip] of item.strips) {
      if (present.has(index)) continue;
      strip.row.remove();
      item.strips.delete(index);
    }
    for (const sequence of shown) {
      if (!item.strips.has(sequence.index)) item.strips.set(sequence.index, addStrip(item.root));
      const strip = item.strips.get(sequence.index);
      setText(strip.label, request.sequences.length > 1 ? String(sequence.index) : "");
      drawStrip(strip.canvas, sequence, scene, theme, theme.requests[palette.of(request.id)]);
    }
  }
}

function stateOf(request) {
  if (request.state === "preempted") return "preempted, waits to be computed again";
  if (request.state === "swapped") return "preempted, swapped out to host memory";
  return request.state;
}

function factsOf(request) {
  const { num_prompt_tokens: prompt, num_cached_tokens: cached } = request;
  const generated = request.sequences.reduce((sum, each) => sum + Math.max(0, each.num_tokens - prompt), 0);
  const found = cached ? `, ${cached} found cached` : "";
  return `${prompt} prompt tokens${found}${generated ? `; ${generated} generated` : ""}`;
}

function addStrip(root) {
  const row = element("div", "strip");
  const label = element("span", "");
  const canvas = document.createElement("canvas");
  canvas.setAttribute("role", "img");
  row.append(label, canvas);
  root.append(row);
  return { row, label, canvas };
}

function drawStrip(canvas, sequence, scene, theme, colour) {
  const table = sequence.block_table.filter((block) => block >= 0);
  const shared = table.filter((block) => scene.counts[block] > 1).length;
  canvas.parentElement.hidden = !table.length;
  canvas.setAttribute("aria-label", table.length ? `blocks ${table.join(", ")}; ${shared} shared` : "no blocks");
  const width = canvas.clientWidth;
  if (!width) return;
  const context = prepare(canvas, width, HEIGHT);
  const painter = new Painter(context, theme);
  const size = Math.min(WIDEST, width / Math.max(table.length, 1));
  const gap = size > 6 ? 2 : size > 2 ? 0.5 : 0;
  table.forEach((block, index) => {
    const width = Math.max(size - gap, 0.5);
    painter.cell(scene, block, index * size, 1, width, HEIGHT - 4, { label: String(block), colour });
  });
  painter.paint();
  context.fillStyle = theme.ink;
  // What is shared is underlined.
  table.forEach((block, index) => {
    if (scene.counts[block] > 1) context.fillRect(index * size, HEIGHT - 1.5, Math.max(size - gap, 0.5), 1.5);
  });
}

function element(name, className) {
  const made = document.createElement(name);
  made.className = className;
  return made;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
