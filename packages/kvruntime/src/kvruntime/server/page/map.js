// The block map: a square for each block, under a pointer and the arrow keys.

import { Painter, prepare } from "./cells.js";

const LARGEST = 30;
const LARGEST_OF_FEW = 44;
const FEW = 100; // blocks
const SMALLEST = 4;
const TALLEST = 400;
const NOTICE = 1400; // milliseconds for which a copy is pointed out
const still = matchMedia("(prefers-reduced-motion: reduce)");

export class BlockMap {
  constructor(group, tip) {
    this.group = group;
    this.canvas = group.querySelector("canvas");
    this.tip = tip;
    this.scene = null;
    this.theme = null;
    this.chosen = -1;
    this.request = null; // the one that a pointer is on, in the list
    this.notices = [];
    this.frame = 0;
    this.layout = { columns: 1, size: SMALLEST, width: SMALLEST };
    this.listen();
  }

  show(scene, theme) {
    this.scene = scene;
    this.theme = theme;
    this.draw();
    if (this.chosen >= 0) this.point(this.chosen);
  }

  // Point out blocks for a moment; two of them are a copy from the first to the second.
  notice(blocks) {
    this.notices.push({ blocks, since: performance.now() });
    if (still.matches) setTimeout(() => this.draw(), NOTICE);
    this.animate();
  }

  highlight(requestId) {
    this.request = requestId;
    this.draw();
  }

  listen() {
    const { canvas, group } = this;
    canvas.addEventListener("pointermove", (event) => this.point(this.blockAt(event), event));
    canvas.addEventListener("pointerleave", () => this.point(-1));
    group.addEventListener("blur", () => this.point(-1));
    group.addEventListener("focus", () => {
      if (group.matches(":focus-visible")) this.point(Math.max(this.chosen, 0));
    });
    group.addEventListener("keydown", (event) => {
      if (!this.scene) return;
      const last = this.scene.numBlocks - 1;
      const at = Math.max(this.chosen, 0);
      const { columns } = this.layout;
      const places = {
        ArrowLeft: at - 1, ArrowRight: at + 1, ArrowUp: at - columns, ArrowDown: at + columns,
        Home: 0, End: last,
      };
      if (event.key === "Escape") this.point(-1);
      else if (event.key in places) {
        if (places[event.key] >= 0 && places[event.key] <= last) this.point(places[event.key]);
        event.preventDefault();
      }
    });
    new ResizeObserver(() => this.draw()).observe(group);
  }

  blockAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const { columns, size, width } = this.layout;
    const column = Math.floor(((event.clientX - box.left) * columns) / width);
    const block = Math.floor((event.clientY - box.top) / size) * columns + column;
    return column < columns && block < (this.scene?.numBlocks ?? 0) ? block : -1;
  }

  // Say what a block is, beside the pointer or the block itself.
  point(block, event) {
    const moved = block !== this.chosen;
    this.chosen = block;
    if (block < 0 || !this.scene) this.tip.hidden = true;
    else {
      const text = this.scene.describe(block);
      if (this.tip.textContent !== text) this.tip.textContent = text;
      this.tip.hidden = false;
      const box = this.canvas.getBoundingClientRect();
      const [x, y] = this.corner(block);
      if (event || moved) this.place(event?.clientX ?? box.left + x + this.layout.size, event?.clientY ?? box.top + y);
    }
    if (moved) this.draw();
  }

  place(x, y) {
    const { width, height } = this.tip.getBoundingClientRect();
    this.tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 4))}px`;
    this.tip.style.top = `${y + 16 + height > innerHeight ? Math.max(4, y - height - 8) : y + 16}px`;
  }

  // The left and upper edge of a square; columns fill the width, so that some are a pixel wider.
  corner(block) {
    const { columns, size, width } = this.layout;
    return [Math.round(((block % columns) * width) / columns), Math.floor(block / columns) * size];
  }

  arrange() {
    const width = this.group.clientWidth;
    const { numBlocks } = this.scene;
    let columns = Math.ceil(width / (numBlocks > FEW ? LARGEST : LARGEST_OF_FEW));
    const height = () => Math.ceil(numBlocks / columns) * Math.floor(width / columns);
    while (width / columns > SMALLEST && height() > TALLEST) columns += 1;
    this.layout = { columns, size: Math.floor(width / columns), width };
    return { width, height: height() };
  }

  draw() {
    if (!this.scene || !this.group.clientWidth) return;
    const { width, height } = this.arrange();
    const context = prepare(this.canvas, width, height);
    const painter = new Painter(context, this.theme);
    const { size } = this.layout;
    const gap = size < 9 ? 1 : 2;
    const held = this.blocksOfRequest();
    for (let block = 0; block < this.scene.numBlocks; block += 1) {
      const [x, y] = this.corner(block);
      const emphasis = held && !held.has(block) ? 0.3 : 1;
      painter.cell(this.scene, block, x, y, size - gap, size - gap, { emphasis });
    }
    painter.paint();
    this.drawNotices(context, size - gap);
    if (this.chosen >= 0) this.outline(context, this.chosen, size - gap, this.theme.ink, 1);
  }

  blocksOfRequest() {
    const request = this.scene.snapshot.requests.find((each) => each.id === this.request);
    return request && new Set(request.sequences.flatMap((sequence) => sequence.block_table));
  }

  outline(context, block, size, colour, alpha) {
    const [x, y] = this.corner(block);
    context.globalAlpha = alpha;
    context.strokeStyle = colour;
    context.lineWidth = 2;
    context.strokeRect(x - 0.5, y - 0.5, size + 1, size + 1);
    context.globalAlpha = 1;
  }

  drawNotices(context, size) {
    const now = performance.now();
    this.notices = this.notices.filter(({ since }) => now - since < NOTICE);
    for (const { blocks, since } of this.notices) {
      const alpha = still.matches ? 1 : 1 - (now - since) / NOTICE;
      for (const block of blocks) this.outline(context, block, size, this.theme.ink, alpha);
      if (blocks.length === 2) this.drawArrow(context, blocks, size, alpha);
    }
  }

  drawArrow(context, [source, destination], size, alpha) {
    const [x0, y0, x1, y1] = [...this.corner(source), ...this.corner(destination)].map((each) => each + size / 2);
    const [dx, dy] = [x1 - x0, y1 - y0];
    // A bow, so that an arrow along a row is seen over the squares.
    const [cx, cy] = [(x0 + x1) / 2 - dy * 0.2, (y0 + y1) / 2 + dx * 0.2 - 10];
    context.globalAlpha = alpha;
    context.strokeStyle = context.fillStyle = this.theme.ink;
    context.lineWidth = 2;
    context.beginPath();
    context.moveTo(x0, y0);
    context.quadraticCurveTo(cx, cy, x1, y1);
    context.stroke();
    const angle = Math.atan2(y1 - cy, x1 - cx);
    context.beginPath();
    context.moveTo(x1, y1);
    for (const turn of [-0.5, 0.5]) context.lineTo(x1 - 9 * Math.cos(angle + turn), y1 - 9 * Math.sin(angle + turn));
    context.fill();
    context.globalAlpha = 1;
  }

  animate() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.draw();
      if (this.notices.length && !still.matches) this.animate();
    });
  }
}
