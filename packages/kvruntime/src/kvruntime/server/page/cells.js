// One block as a square: on the map, and in the strip of a request.

const LEAST_DETAIL = 9; // pixels below which a square has neither outline nor number

// Draw the blocks of one kind together: changing colours is what takes time on a canvas.
export class Painter {
  constructor(context, theme) {
    this.context = context;
    this.theme = theme;
    this.batches = new Map();
    this.labels = [];
  }

  // `emphasis` below 1 pushes a block back behind others. A strip gives its own colour and label.
  cell(scene, block, x, y, width, height, { label = "", colour = null, emphasis = 1 } = {}) {
    const detailed = Math.min(width, height) >= LEAST_DETAIL;
    if (!scene.isHeld(block)) {
      const state = scene.states[block];
      if (state === "c") this.add("fill", this.theme.resting, 0.75 * emphasis, x, y, width, height);
      else if (!detailed) this.add("fill", this.theme.rule, 0.45 * emphasis, x, y, width, height);
      else this.add("stroke", state === "x" ? this.theme.ink : this.theme.rule, emphasis, x, y, width, height);
      return;
    }
    const colours = colour
      ? [colour]
      : this.theme.requests.filter((_, index) => scene.colours[block] & (1 << index));
    const share = width / Math.max(colours.length, 1);
    // What is not written yet of a last block is paler, at the right: text goes that way. Only full
    // blocks are shared between requests, each in a band of its colour.
    const isWhole = !detailed || colours.length > 1;
    const filled = isWhole ? 1 : scene.filled[block] / scene.snapshot.block_size;
    colours.forEach((each, index) => {
      if (filled < 1) this.add("fill", each, 0.3 * emphasis, x, y, width, height);
      this.add("fill", each, emphasis, x + index * share, y, share * filled, height);
    });
    const count = scene.counts[block] > 1 ? String(scene.counts[block]) : "";
    if (!detailed || height < 11) return;
    if (label) this.labels.push({ text: label, x, y, width, height, colour: colours[0], emphasis });
    else if (count) this.labels.push({ text: count, x, y, width, height, colour: null, emphasis });
  }

  add(kind, colour, alpha, ...box) {
    const name = `${kind} ${colour} ${alpha}`;
    if (!this.batches.has(name)) this.batches.set(name, { kind, colour, alpha, boxes: [] });
    this.batches.get(name).boxes.push(box);
  }

  paint() {
    const { context } = this;
    for (const { kind, colour, alpha, boxes } of this.batches.values()) {
      context.globalAlpha = alpha;
      context.fillStyle = context.strokeStyle = colour;
      context.lineWidth = 1;
      if (kind === "fill") for (const [x, y, width, height] of boxes) context.fillRect(x, y, width, height);
      else for (const [x, y, width, height] of boxes) context.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
    }
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.lineJoin = "round";
    context.lineWidth = 3;
    for (const { text, x, y, width, height, colour, emphasis } of this.labels) {
      const size = Math.min(height - 3, 12, (1.6 * (width - 2)) / text.length);
      const [centre, middle] = [x + width / 2, y + height / 2];
      context.globalAlpha = emphasis;
      context.font = `600 ${size}px system-ui, "Segoe UI", Roboto, Arial, sans-serif`;
      context.fillStyle = this.theme.paper;
      if (colour) {
        // A rim in the block's colour, for the part of it that is pale.
        context.strokeStyle = colour;
        context.strokeText(text, centre, middle + 0.5);
      } else {
        const half = Math.min(width / 2 - 1, context.measureText(text).width / 2 + 3);
        context.beginPath();
        context.roundRect(centre - half, middle - size / 2 - 2, 2 * half, size + 4, 4);
        context.fill();
        context.fillStyle = this.theme.ink;
      }
      context.fillText(text, centre, middle + 0.5);
    }
    context.globalAlpha = 1;
  }
}

// Make a canvas as sharp as the screen, and return its context in units of CSS pixels.
export function prepare(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}
